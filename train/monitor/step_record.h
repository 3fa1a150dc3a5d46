// StepRecord: a finished step's numbers. Telemetry passes them to the console, the CSV tables, the heartbeats and
// TensorBoard.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/routes.h"
#include "io/json_config.h"

namespace triad {

struct StepRecord {
  int64_t step = 0;  // optimizer steps done, this one included
  double loss = 0, lr = 0, grad_norm = 0;
  int64_t tokens = 0;  // tokens in this optimizer step on all ranks
  double comm_ms = 0;  // time that the step waited for other ranks
  // Step: host time between results; compute and update: device times (TrainStep::Times).
  double step_ms = 0, compute_ms = 0, update_ms = 0;
  std::vector<double> fetch_ms = {};  // how long each micro-step waited for its tokens, ms
  const Routes* routes = nullptr;     // kernels chosen so far, for the heartbeat's fields fb_*
  Json more = Json::object();         // further fields for the step's heartbeat

  // The remaining fields are set by ThroughputMeter.
  bool row = false, first = false;  // the step has a row in training.csv; it is the first step in this process
  int64_t run_tokens = 0;           // tokens that the run has trained on so far
  double median_ms = 0;             // median step time since the last row
  double tokens_per_s = 0;          // tokens per second, computed from median_ms
  double mfu = 0;                   // model FLOP/s utilization: relative to the card's peak; 0: unknown
  double row_comm_ms = 0;           // mean comm_ms since the last row
  double eta_s = 0;                 // estimated time until the run ends, s, if a FLOP takes as long in all stages
};

}  // namespace triad
