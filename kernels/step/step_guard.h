// Decides on the device whether an optimizer step may be applied, so that the host can queue the update and the next
// step without waiting for the loss and the gradient norm.
#pragma once
#include "engine/context.h"

namespace triad {

// Columns of `numbers`, a step's tensor of numbers.
struct StepNumbers {
  enum : int64_t {
    loss,                // input: loss sum over all of the step's positions
    index_loss,          // input: a taught index's loss sum over layers and all of the step's rows; 0 without an index
    norm_squared,        // input: the whole gradient's squared norm, without the index's
    index_norm_squared,  // input: the index's; 0 without an index
    applied,             // output: norm_squared if the step may be applied, else NaN, by which AdamW skips the update
    index_applied,       // output: index_norm_squared or NaN likewise
    halted,              // both: 1 after a step that was not finite with `halt` set; no later step is applied
    bad_part,            // output: index of the first gradient part that is not finite; -1: none
    bad_rank,            // output: first rank whose loss or probe is not finite; -1: none, or without `ranks`
    stop,                // output: not 0 if a rank asked that the run end after this step
    count
  };
};

// Columns of `ranks`: one rank's share in a step, before gradients are summed over ranks.
struct RankNumbers {
  enum : int64_t {
    loss,        // loss sum over the rank's positions
    index_loss,  // index loss sum over the rank's rows
    probe,       // squared norm of a small gradient that backward computes last; any earlier NaN reaches it
    stop,        // not 0: this rank was asked to end the run
    count
  };
};

// numbers [StepNumbers::count] f64 updated  <-  grads [n], any float dtype; parts [p,2] i64: each part's first element
// and element count; ranks [world, RankNumbers::count] f64, any row stride, may be absent. If ranks is given, loss and
// index_loss become the sums of the ranks' in rank order. halt: a step that may not be applied stops all later ones
// too.
void judge_step(Context&, Tensor numbers, ConstTensor grads, ConstTensor parts, ConstTensor ranks, bool halt);

namespace cuda {
void judge_step(Context&, Tensor numbers, ConstTensor grads, ConstTensor parts, ConstTensor ranks, bool halt);
}  // namespace cuda
}  // namespace triad
