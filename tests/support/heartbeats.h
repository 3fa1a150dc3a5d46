// Reads a run's heartbeats.
#pragma once
#include <string>
#include <vector>

#include "io/json_config.h"

namespace triad::test {

// A rank's heartbeats with this msg, in order. An incomplete last line is ignored; no file gives no heartbeats.
std::vector<Json> heartbeats(const std::string& folder, int rank, const std::string& msg);

}  // namespace triad::test
