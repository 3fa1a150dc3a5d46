// Decides on the device whether an optimizer step may be applied, so that the host can queue the update and the next
// step without waiting for the loss and the gradient norm.
#pragma once
#include "engine/context.h"

namespace triad {

// The elements of a step's tensor of numbers.
struct StepNumbers {
  enum : int64_t {
    loss,          // in: the sum of the loss over the step's positions
    norm_squared,  // in: the squared norm of the whole gradient
    applied,       // out: norm_squared if the step may be applied, else NaN, which makes AdamW skip the update
    halted,        // in and out: 1 once a step was not finite and `halt` was set; no later step is applied
    bad_part,      // out: the first part of this step's gradient that is not finite; -1: none
    bad_rank,      // out: the first rank whose own numbers are not finite; -1: none, or a single rank
    stop,          // out: not 0 if a rank requested an orderly end after this step
    count
  };
};

// One rank's share of a step, before gradients are summed: one row of a tensor.
struct RankNumbers {
  enum : int64_t {
    loss,   // the sum of the loss over the rank's positions
    probe,  // sum of squares of a small gradient computed last in backward, which any earlier NaN reaches
    stop,   // not 0: this rank was requested to end the run
    count
  };
};

// numbers [StepNumbers::count] f64 updated  <-  grads [n] acc; parts [p,2] i64: first element and number of elements of
// each part; ranks [world, RankNumbers::count] f64, rows of any stride, may be absent. With ranks, loss is set to the
// sum of their losses in rank order. halt: if this step may not be applied, no later step is applied either.
void judge_step(Context&, Tensor numbers, ConstTensor grads, ConstTensor parts, ConstTensor ranks, bool halt);

namespace cuda {
void judge_step(Context&, Tensor numbers, ConstTensor grads, ConstTensor parts, ConstTensor ranks, bool halt);
}  // namespace cuda
}  // namespace triad
