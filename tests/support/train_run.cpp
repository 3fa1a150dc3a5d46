#include "tests/support/train_run.h"

#include <chrono>
#include <sstream>
#include <thread>

namespace triad::test {

std::string train_on(const std::string& out, const std::string& device, const std::string& more) {
  return "train " + kTiny + " --set runtime.device=" + device + " --set log.out_dir=" + out + " " + more;
}

std::vector<std::string> lines(const std::string& path) {
  std::vector<std::string> out;
  std::istringstream in(read_text(path));
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

Json json_of(const std::string& path) { return parse_json(read_text(path), path); }

void wait_for_rows(const std::string& folder, size_t rows) {
  for (int i = 0; i < 180000 && lines(folder + "/training.csv").size() < rows + 1; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace triad::test
