// Reads a run's heartbeats for the report: lines of each rank, events, and the run's status.
#pragma once
#include <map>
#include <string>

#include "io/json_config.h"
#include "tools/report/series.h"

namespace triad {

double number_in(const Json& object, const char* key);  // NaN if the object has no such number

// What the report reads only from rank 0's heartbeats.
struct FirstRank {
  std::map<std::string, Points> steps;  // loss, lr, grad_norm and tokens_per_s of each step with a heartbeat
  // Running time in seconds after each step, without the time between a stop and the resume.
  Points clock;
  std::vector<LayerValue> gradient_norms;
  Points bits_per_byte;       // evaluation step and value
  double bits_per_nat = NAN;  // factor from a loss per token to bits per byte; NaN if unknown
};

// Adds `ranks`, `events` by time, and `stackdumps` to the run's data. Returns what only rank 0's heartbeats hold.
FirstRank add_ranks(Json& data, const std::string& folder);

// How a run stands, by its ranks and events.
struct Status {
  std::string text;    // "complete", "running", "stopped", "killed", "failed", "failed: hung"; empty if unknown
  std::string reason;  // why it stopped or failed, if known
  bool failed = false, running = false;
};
Status status_of(const Json& data, const Json& config, const Json& environment, const std::string& folder);

}  // namespace triad
