// What a run has told in its heartbeats.
#pragma once
#include <string>
#include <vector>

#include "io/json_config.h"

namespace triad::test {

// Those of a rank with that msg, in order. The last line may be under way; none where there is no file yet.
std::vector<Json> heartbeats(const std::string& folder, int rank, const std::string& msg);

}  // namespace triad::test
