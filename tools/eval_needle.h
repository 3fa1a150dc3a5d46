// triad eval --needle: measures how accurately a model recalls a value from its context, by depth of the value and
// length of the context.
#pragma once
#include <string>

#include "io/data/needle_grid.h"

namespace triad {

struct NeedleEval {
  std::string checkpoint, device, dtype, out;
  NeedleQuestions questions;
  bool json = false;
};
// Prints the grid and writes needle.csv and needle.svg to `out`; the default is the run's folder, or without a run the
// checkpoint's.
void eval_needle(const NeedleEval&);

}  // namespace triad
