// Step times and throughput as they are printed, and which steps write a heartbeat. Pure: the caller passes times and
// steps.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "model/flops.h"
#include "train/config/config.h"
#include "train/config/schedule.h"
#include "train/monitor/step_record.h"

namespace triad {

// StepTimes: computes the step time that a training.csv row prints: the median over the steps since the last row, and
// over earlier steps if these are fewer than 5. Single times are unreliable, because a GPU's last steps' results arrive
// together.
class StepTimes {
 public:
  void add(double ms);
  void row() { since_row_ = 0; }  // call after each row: the next median begins here
  double median_ms() const;       // median step time, ms; 0 before the first step

 private:
  std::deque<double> ms_;  // step times, oldest first
  size_t since_row_ = 0;
};

// FLOPs per step on one rank. The mix: the documents within which attention stays (DataSource::attended).
double step_flops(const Config&, const DocumentMix& = {});
// The same on average over a stage's steps; the mix is its rows'.
double stage_flops(const Config&, const TrainStage&, const DocumentMix& = {});

// ThroughputMeter: computes a StepRecord's rates and averages.
class ThroughputMeter {
 public:
  using Clock = std::chrono::steady_clock;
  // step_flops: FLOPs per step on this rank. peak_flops: the card's peak in FLOP/s; 0: unknown. run_tokens: tokens that
  // the run had trained on before this process.
  ThroughputMeter(const Config&, double step_flops, double peak_flops, int64_t run_tokens);
  // A stage begins whose steps have these FLOPs and which ends after step `end`; later stages have later_flops in all.
  // Earlier steps' times don't count for its step time.
  void stage(double step_flops, int64_t end, double later_flops) {
    step_flops_ = step_flops, stage_end_ = end, later_flops_ = later_flops;
    times_ = {};
  }
  // Fills in the record's second half (see StepRecord). now: the time at which the step's result arrived.
  void measure(StepRecord&, Clock::time_point now);

 private:
  const Config& config_;
  double step_flops_, later_flops_ = 0;
  int64_t stage_end_;
  const double peak_flops_;
  StepTimes times_;
  Clock::time_point first_step_;
  double flops_ = 0;  // FLOPs in the steps since the first one
  int64_t steps_ = 0, steps_since_row_ = 0, run_tokens_;
  double comm_ms_since_row_ = 0;
};

// Whether a step writes a heartbeat. every > 0: only steps that are a multiple of `every` do. every = -1: each of the
// first 1,000 steps does, then every 10th up to 10,000, every 100th up to 100,000 and so on; so does any step if the
// last heartbeat is a minute old.
bool heartbeat_due(int64_t every, int64_t step, double seconds_since_last);

}  // namespace triad
