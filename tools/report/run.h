// A run's folder as its report shows it: what the files of SPEC.md section 3 say, checked, thinned out to what a screen
// can show, as one JSON object. A file that a run need not have may be absent; one that is broken is an Error that
// names it and the line.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "tools/report/series.h"

namespace triad {

struct ReportRun {
  std::string folder;
  Json config, environment;  // null: the run has none
  // The losses of rank 0's steps, with all their digits where there are heartbeats.
  Points losses;
  bool losses_rounded = false;  // there are none: losses are training.csv's
  Points validation;            // the loss of each evaluation
  Points clock;                 // seconds that the run had taken after a step
  std::string needle;           // an SVG; empty: `triad eval --needle` was not called
  Json data;                    // for the charts; its keys are those that tools/report/page.js reads
};

// Throws if the folder is missing, or holds no run.
ReportRun read_run(const std::string& folder);

// Where two objects differ: "group.key", one value and the other (null: absent there).
struct Difference {
  std::string key;
  Json a, b;
};
std::vector<Difference> differences_of(const Json& a, const Json& b);

// The first step, of those that both have, at which the losses differ, and the first at which by more than 1%.
struct Parting {
  std::optional<int64_t> first, by_a_percent;
  int64_t common = 0;  // steps that both have
};
Parting parting_of(const ReportRun& a, const ReportRun& b);

// b's loss less a's where a has one and b's run is as far: {loss, validation}, each {steps, tokens, time} as far as the
// runs tell, each a line over that axis. At a place that b has no loss of its own for, it is taken between two of them.
Json loss_difference(const ReportRun& a, const ReportRun& b);

}  // namespace triad
