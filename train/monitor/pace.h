// Step times as printed, and which steps write a heartbeat. Pure: the caller passes times and steps.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>

namespace triad {

// StepTimes: the step time that a row prints: the median over the steps since the last row, and over earlier steps if
// these are fewer than 5. Single times are unreliable, since the results of a GPU's last steps arrive together.
class StepTimes {
 public:
  void add(double ms);
  void row() { since_row_ = 0; }  // begins a new row
  double median_ms() const;       // 0 before the first step

 private:
  std::deque<double> ms_;  // step times, oldest first
  size_t since_row_ = 0;
};

// Whether a step writes a heartbeat. every > 0: steps that are a multiple of it. every = -1: each of the first 1,000
// steps, then every 10th up to 10,000, every 100th up to 100,000 and so on; also any step when the last heartbeat is a
// minute old.
bool heartbeat_due(int64_t every, int64_t step, double seconds_since_last);

}  // namespace triad
