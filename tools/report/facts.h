// A run's key facts: the tiles at the head of its report, and the rows when two runs are compared.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "tools/report/run.h"

namespace triad {

struct Fact {
  std::string name, text;
  double number = NAN;                     // finite if the fact is a number, so that two runs can be compared
  std::string (*write)(double) = nullptr;  // formats a number in the same way as `text`
  bool warns = false;                      // true: shown as a warning
};
// The facts about a run that its files contain; others are left out.
std::vector<Fact> facts_of(const ReportRun&);

// Whether the run's tokens are text bytes, so that bits per byte follow from the loss.
bool tokens_are_bytes(const Json& config);

}  // namespace triad
