// StepRecord: the numbers of a finished step, which Telemetry passes to its sinks.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/routes.h"
#include "io/json_config.h"

namespace triad {

struct StepRecord {
  int64_t step = 0;  // optimizer steps done, this one included
  double loss = 0, lr = 0, grad_norm = 0;
  int64_t tokens = 0;                                 // of this optimizer step, over all ranks
  double comm_ms = 0;                                 // wait for other ranks
  double step_ms = 0, compute_ms = 0, update_ms = 0;  // between results; device times of TrainStep::Result
  std::vector<double> fetch_ms = {};                  // by micro-step: wait for its tokens
  const Routes* routes = nullptr;                     // for the heartbeat's fb_*
  Json more = Json::object();                         // further fields of the heartbeat

  // Set by ThroughputMeter.
  bool row = false, first = false;  // the step has a row in training.csv; it is the first of this process
  int64_t run_tokens = 0;           // of the run so far
  double median_ms = 0;             // step time since the last row
  double tokens_per_s = 0;          // by median_ms
  double mfu = 0;                   // model FLOP/s over the card's peak; 0: unknown
  double row_comm_ms = 0;           // mean comm_ms since the last row
  double eta_s = 0;                 // estimated time until the run's end
};

}  // namespace triad
