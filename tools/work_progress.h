// Prints a verb's progress to stderr: on a terminal one line that is overwritten, elsewhere a line every 30 s. Standard
// output is left to the result.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace triad {

class WorkProgress {
 public:
  // unit: the plural noun that `total` counts, such as "batches".
  WorkProgress(std::string verb, std::string unit, int64_t total);
  ~WorkProgress();
  WorkProgress(const WorkProgress&) = delete;
  // done: units finished; tokens: tokens processed so far, for the printed rate.
  void show(int64_t done, int64_t tokens);
  double seconds() const;  // since construction

 private:
  const std::string verb_, unit_;
  const int64_t total_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point began_;
  std::chrono::steady_clock::time_point shown_;
};

}  // namespace triad
