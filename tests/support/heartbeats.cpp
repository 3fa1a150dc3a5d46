#include "tests/support/heartbeats.h"

#include <fstream>

namespace triad::test {

std::vector<Json> heartbeats(const std::string& folder, int rank, const std::string& msg) {
  std::vector<Json> found;
  std::ifstream file(folder + "/heartbeat_rank" + std::to_string(rank) + ".jsonl");
  for (std::string line; std::getline(file, line) && !file.eof();)
    if (Json beat = Json::parse(line); beat["msg"] == msg) found.push_back(std::move(beat));
  return found;
}

}  // namespace triad::test
