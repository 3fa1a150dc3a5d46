// env.json: describes the machine and the environment of a run.
#pragma once
#include <string>

#include "engine/comm/comm.h"
#include "io/json_config.h"

namespace triad {

// The content of env.json: machine, ranks, libraries, build and the environment variables that affect a run.
Json environment_report(Device, const Comm&, const std::string& build);

}  // namespace triad
