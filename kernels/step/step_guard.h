// Decides on the device whether an optimizer step may be applied, so that the host can queue the update and the next
// step without waiting for the loss and the gradient norm.
#pragma once
#include "engine/context.h"

namespace triad {

// The columns of a step's tensor of numbers, `numbers`.
struct StepNumbers {
  enum : int64_t {
    loss,          // in: sum of the loss over all positions of the step
    norm_squared,  // in: squared norm of the whole gradient
    applied,       // out: norm_squared if the step may be applied, else NaN, by which AdamW skips the update
    halted,        // in and out: 1 after a step that was not finite with `halt` set; no later step is applied
    bad_part,      // out: index of the first part of the gradient that is not finite; -1: none
    bad_rank,      // out: first rank whose loss or probe is not finite; -1: none, or without `ranks`
    stop,          // out: not 0 if a rank requested that the run ends after this step
    count
  };
};

// The columns of `ranks`: one rank's share of a step, before gradients are summed over ranks.
struct RankNumbers {
  enum : int64_t {
    loss,   // sum of the loss over the rank's positions
    probe,  // sum of squares of a small gradient that backward computes last; any earlier NaN reaches it
    stop,   // not 0: this rank was requested to end the run
    count
  };
};

// numbers [StepNumbers::count] f64 updated  <-  grads [n] of any float dtype; parts [p,2] i64: first element and number
// of elements of each part; ranks [world, RankNumbers::count] f64, rows of any stride, may be absent. If ranks is
// given, loss is set to the sum of the ranks' losses in rank order. halt: a step that may not be applied stops all
// later ones too.
void judge_step(Context&, Tensor numbers, ConstTensor grads, ConstTensor parts, ConstTensor ranks, bool halt);

namespace cuda {
void judge_step(Context&, Tensor numbers, ConstTensor grads, ConstTensor parts, ConstTensor ranks, bool halt);
}  // namespace cuda
}  // namespace triad
