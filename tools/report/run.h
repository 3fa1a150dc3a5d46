// Reads a run's folder for its report: checks the files, reduces their numbers to what a screen can show, and collects
// them in one JSON object. Optional files may be absent; for a broken file it throws an Error that names file and line.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "tools/report/ranks.h"
#include "tools/report/series.h"

namespace triad {

struct ReportRun {
  std::string folder;
  Status status;
  Json config, environment;  // config.json's and env.json's contents; null if absent
  Points losses;             // rank 0's loss by step
  // True: the losses are from training.csv, because the run has no heartbeats, which hold all digits.
  bool losses_rounded = false;
  Points validation;          // validation loss, by evaluation step
  Points clock;               // running time in seconds after each step
  double bits_per_nat = NAN;  // factor from a loss per token to bits per byte; NaN if unknown
  std::string needle;         // an SVG for each grid that `triad eval --needle` wrote; empty without one
  Json data;                  // input for the page's charts; tools/report/page.js reads its keys
};

// Whether the run has train.stages, so that its steps and evaluations may have different row lengths.
bool has_stages(const Json& config);

// Reads a run's folder. Throws if the folder is missing or holds no run.
ReportRun read_run(const std::string& folder);

// A key ("group.key") at which two objects differ, with both values (null if absent).
struct Difference {
  std::string key;
  Json a, b;
};
std::vector<Difference> differences_of(const Json& a, const Json& b);

// A key ("group.key") in which several runs' configs differ, with the value in each run (null if absent). The runs'
// folders are left out.
struct DifferingKey {
  std::string key;
  std::vector<Json> values;
};
std::vector<DifferingKey> differing_keys(const std::vector<ReportRun>& runs);

// The first steps at which two runs' losses differ at all, and by more than 1%, among the steps that both runs have.
struct FirstDifference {
  std::optional<int64_t> first, by_one_percent;
  int64_t common = 0;  // steps that both runs have
};
FirstDifference first_difference_of(const ReportRun& a, const ReportRun& b);

// The difference b - a between two runs' losses, at a's points within b's range, where b is interpolated linearly.
// Returns {loss, validation}; each is {steps, tokens, time}, and each of these a line over that axis, left out if a run
// doesn't have the axis.
Json loss_difference(const ReportRun& a, const ReportRun& b);

}  // namespace triad
