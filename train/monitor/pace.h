// How often a run writes, and how fast it says that it is. Pure: the caller passes times and steps.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>

namespace triad {

// The time of a step as a row prints it: the median of the steps since the last row, and of those before where there
// are few. The results of a GPU's last steps arrive together, so a single step may seem to have taken no time.
class StepTimes {
 public:
  void add(double ms);
  void row() { since_row_ = 0; }  // the next median begins here
  double median_ms() const;       // 0 before the first step

 private:
  std::deque<double> ms_;  // the last ones, at least those since the row
  size_t since_row_ = 0;
};

// Whether a step writes a heartbeat. every > 0: each step that is a multiple of it. -1: each of the first 1,000 steps,
// then every 10th up to 10,000, every 100th up to 100,000 and so on, and besides one where the last is a minute old.
bool heartbeat_due(int64_t every, int64_t step, double seconds_since_last);

}  // namespace triad
