// WorkProgress: prints a verb's progress to stderr: on a terminal one line that is overwritten, elsewhere a line every
// 30 s. Nothing is printed to standard output, which is for the result.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace triad {

class WorkProgress {
 public:
  // verb: the text before the numbers. unit: a plural noun for what `total` counts, such as "batches".
  WorkProgress(std::string verb, std::string unit, int64_t total);
  ~WorkProgress();
  WorkProgress(const WorkProgress&) = delete;
  // done: units finished. tokens: tokens processed so far, from which the printed rate is computed.
  void show(int64_t done, int64_t tokens);
  void show(int64_t done) { show(done, -1); }  // shows no rate
  double seconds() const;                      // time since construction

 private:
  const std::string verb_, unit_;
  const int64_t total_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point began_;
  std::chrono::steady_clock::time_point shown_;
};

}  // namespace triad
