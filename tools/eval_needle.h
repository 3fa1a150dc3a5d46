// triad eval --needle: what a model recalls, measured depth by depth and length by length.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "io/needle.h"
#include "tools/needle_grid.h"

namespace triad {

// Of sequences of one length, one behind the other: the likeliest token at each position that has a target (not -1), in
// their order.
using Answers =
    std::function<std::vector<int32_t>(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t T)>;

struct NeedleQuestions {
  std::vector<int64_t> lengths;  // empty: an eighth, a quarter, half and all of the task's
  std::vector<double> depths;
  int64_t samples = 64, batch = 8;
};

// Every sample is a probe of its own (io/needle.h); the value's tokens stand in it, so all that are the likeliest is
// what greedy decoding would have said.
NeedleGrid measure_needles(const NeedleTask&, NeedleQuestions, const Answers&);

struct NeedleEval {
  std::string checkpoint, device, dtype, out;
  NeedleQuestions questions;
  bool json = false;
};
// Prints the grid, and leaves it as needle.csv and needle.svg in `out`, or where the checkpoint is.
void eval_needle(const NeedleEval&);

}  // namespace triad
