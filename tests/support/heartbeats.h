// Reads a run's heartbeats: the JSON lines that each rank appends to heartbeat_rankN.jsonl.
#pragma once
#include <string>
#include <vector>

#include "io/json_config.h"

namespace triad::test {

// Returns the rank's heartbeats whose field "msg" equals msg, in file order. Ignores a last line that is still being
// written; returns an empty list if there is no file.
std::vector<Json> heartbeats(const std::string& folder, int rank, const std::string& msg);

}  // namespace triad::test
