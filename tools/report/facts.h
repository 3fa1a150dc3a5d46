// What the head of a report says of a run, line by line, and its table of two runs compares.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "tools/report/run.h"

namespace triad {

struct Fact {
  std::string name, text;
  double number = NAN;                     // where it is one that can be compared
  std::string (*write)(double) = nullptr;  // a number as the text has it
  bool warns = false;
};
// Only what the run's files tell.
std::vector<Fact> facts_of(const ReportRun&);

// A token is a byte of the text, so that the loss gives bits per byte.
bool tokens_are_bytes(const Json& config);

}  // namespace triad
