// triad eval --needle: measures how accurately a model answers a data.kind needle task, by needle depth and sequence
// length.
#pragma once
#include <string>

#include "io/data/needle_grid.h"

namespace triad {

struct NeedleEval {
  std::string checkpoint, device, dtype, out;
  std::string task;  // a NeedleKind word; empty: the task that the model was trained on
  NeedleQuestions questions;
  bool json = false;
};
// Prints the grid and writes it as CSV and SVG (needle_file()) to `out`; the default is the run's folder, or without a
// run the checkpoint's.
void eval_needle(const NeedleEval&);

}  // namespace triad
