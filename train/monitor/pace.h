// Step times and throughput as printed, and which steps write a heartbeat. Pure: the caller passes times and steps.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "train/config.h"
#include "train/monitor/step_record.h"

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

// ThroughputMeter: the rates and averages of a StepRecord.
class ThroughputMeter {
 public:
  using Clock = std::chrono::steady_clock;
  // peak_flops: of the card, FLOP/s; 0: unknown. run_tokens: trained on before this process.
  ThroughputMeter(const Config&, double peak_flops, int64_t run_tokens);
  // Fills in the second half of the record. now: when the step's result arrived.
  void measure(StepRecord&, Clock::time_point now);

 private:
  const Config& config_;
  const double step_flops_, peak_flops_;
  StepTimes times_;
  Clock::time_point first_step_;
  int64_t steps_ = 0, steps_since_row_ = 0, run_tokens_;
  double comm_ms_since_row_ = 0;
};

// Whether a step writes a heartbeat. every > 0: steps that are a multiple of it. every = -1: each of the first 1,000
// steps, then every 10th up to 10,000, every 100th up to 100,000 and so on; also any step when the last heartbeat is a
// minute old.
bool heartbeat_due(int64_t every, int64_t step, double seconds_since_last);

}  // namespace triad
