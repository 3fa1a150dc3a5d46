// Reads a run's folder for its report: checks its files, thins their numbers to what a screen can show, and collects
// them in one JSON object. Optional files may be absent; a broken file is an Error that names file and line.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "tools/report/series.h"

namespace triad {

struct ReportRun {
  std::string folder;
  Json config, environment;     // config.json and env.json; null if absent
  Points losses;                // by step, of rank 0
  bool losses_rounded = false;  // the losses are training.csv's, because the run has no heartbeats with all digits
  Points validation;            // loss of each evaluation, by step
  Points clock;                 // running time in seconds after each step
  std::string needle;           // an SVG of needle.csv; empty without `triad eval --needle`
  Json data;                    // input of the charts; tools/report/page.js reads its keys
};

// Throws if the folder is missing, or holds no run.
ReportRun read_run(const std::string& folder);

// The keys ("group.key") at which two objects differ, with both values (null if absent).
struct Difference {
  std::string key;
  Json a, b;
};
std::vector<Difference> differences_of(const Json& a, const Json& b);

// The first steps at which two runs' losses differ at all, and by more than 1%, among the steps that both have.
struct FirstDifference {
  std::optional<int64_t> first, by_one_percent;
  int64_t common = 0;  // number of steps that both have
};
FirstDifference first_difference_of(const ReportRun& a, const ReportRun& b);

// The difference b - a of the losses, at a's points within b's range: {loss, validation}, each {steps, tokens, time},
// each a line over that axis, left out if a run does not have that axis. b is interpolated linearly.
Json loss_difference(const ReportRun& a, const ReportRun& b);

}  // namespace triad
