// The banner that a run prints before its first step: model, data, device, output folder, memory and time. Details are
// in the run's files.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "train/config/config.h"
#include "train/fit/step_time.h"

namespace triad {

struct RunSummary {
  int64_t parameters = 0, first_step = 0;
  double planned_mib = 0;
  double step_flops = 0;                 // FLOPs per step on one rank
  std::string data, documents;           // documents: DataSource::documents
  std::string time;                      // run_time_text(); empty: there is no estimate for the card
  std::string start;                     // StartTimes::text
  std::vector<std::string> environment;  // one line for each config key that the environment changed
};

// The banner: at most thirteen lines, each "word  text", and one per stage in train.stages.
std::vector<std::string> banner_lines(const Config&, Device, const Comm&, const RunSummary&);
// Run details for the log: the ranks and the whole config.
std::vector<std::string> banner_details(const Config&, const Comm&, const std::vector<std::string>& environment);

// An estimate as text: duration, tokens/s, a step's time, joules, and what it is made of. in_parts: with a step's
// parts.
std::string run_time_text(const RunTime&, const Card&, bool in_parts);
// What an estimate was off by: "estimated 52,083 tokens/s, measured 51,200: 1.7% slower".
std::string estimate_error_text(double estimated, double measured);

std::string grouped(int64_t number);        // 1234567 as "1,234,567"
std::string duration_text(double seconds);  // "59s", "1m05s", "2h10m", "3d04h"

}  // namespace triad
