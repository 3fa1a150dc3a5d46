// triad eval --needle: what a model recalls, measured depth by depth and length by length.
#pragma once
#include <string>

#include "io/data/needle_grid.h"

namespace triad {

struct NeedleEval {
  std::string checkpoint, device, dtype, out;
  NeedleQuestions questions;
  bool json = false;
};
// Prints the grid, and leaves it as needle.csv and needle.svg in `out`, the run's folder, or where the checkpoint is.
void eval_needle(const NeedleEval&);

}  // namespace triad
