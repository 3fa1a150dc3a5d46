// env.json: describes a run's machine and environment.
#pragma once
#include <string>

#include "engine/comm/comm.h"
#include "io/json_config.h"

namespace triad {

// env.json's content: machine, ranks, libraries, build and the environment variables that affect a run.
Json environment_report(Device, const Comm&, const std::string& build);

}  // namespace triad
