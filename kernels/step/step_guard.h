// Whether an optimizer step may be applied, judged where its numbers are: the host need not wait for them to queue the
// update, nor the step after it.
#pragma once
#include "engine/context.h"

namespace triad {

// What a step's numbers are, each a double at its place in the tensor.
struct StepNumbers {
  enum : int64_t {
    loss,          // in: the sum over the step's positions
    norm_squared,  // in: of the whole gradient
    applied,       // out: norm_squared, or NaN, at which AdamW changes nothing: the numbers are not finite, or halted
    halted,        // in and out: 1 since a step was not finite, if such a step is to be the last
    bad_part,      // out: of this step's gradient the first part that is not finite; -1: none
    bad_rank,      // out: the first rank whose own numbers are not finite; -1: none, or there are no others
    stop,          // out: not 0 if a rank asks for an orderly end after this step
    count
  };
};

// What each rank of a run says of its own share of a step, before gradients are summed: one row of a tensor.
struct RankNumbers {
  enum : int64_t {
    loss,   // the sum over its positions
    probe,  // the sum of squares of a small gradient that comes last in backward: a NaN anywhere before reaches it
    stop,   // not 0: it was asked to end
    count
  };
};

// numbers [StepNumbers::count] f64 updated  <-  grads [n] acc; parts [p,2] i64: first element and number of elements of
// each part; ranks [world, RankNumbers::count] f64, rows of any stride: where it is given, loss is the sum of theirs,
// in their order. halt: no step after this one is applied either if this one may not be.
void judge_step(Context&, Tensor numbers, ConstTensor grads, ConstTensor parts, ConstTensor ranks, bool halt);

namespace cuda {
void judge_step(Context&, Tensor numbers, ConstTensor grads, ConstTensor parts, ConstTensor ranks, bool halt);
}  // namespace cuda
}  // namespace triad
