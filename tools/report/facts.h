// The key facts of a run: tiles at the head of its report, rows in a comparison of two runs.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "tools/report/run.h"

namespace triad {

struct Fact {
  std::string name, text;
  double number = NAN;                     // finite if the fact is a number that two runs can compare
  std::string (*write)(double) = nullptr;  // formats a number as `text` does
  bool warns = false;                      // shown as a warning
};
// The facts that the run's files contain; others are left out.
std::vector<Fact> facts_of(const ReportRun&);

// Whether a token is a byte of text, so that the loss gives bits per byte.
bool tokens_are_bytes(const Json& config);

}  // namespace triad
