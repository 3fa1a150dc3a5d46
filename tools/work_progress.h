// How far a verb is with its work, on stderr: on a terminal a line that is overwritten, elsewhere a line now and then.
// stdout stays the result's.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace triad {

class WorkProgress {
 public:
  // unit: what `total` counts: "batches".
  WorkProgress(std::string verb, std::string unit, int64_t total);
  ~WorkProgress();
  WorkProgress(const WorkProgress&) = delete;
  // done: of total; tokens: that were worked on so far, of which the rate is told.
  void show(int64_t done, int64_t tokens);
  double seconds() const;  // since the begin

 private:
  const std::string verb_, unit_;
  const int64_t total_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point began_;
  std::chrono::steady_clock::time_point shown_;
};

}  // namespace triad
