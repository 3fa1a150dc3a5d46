// Adds gradients to stored ones: what a step's micro-batches contribute, one after the other.
#pragma once
#include "engine/context.h"

namespace triad {

struct AccumulateOptions {
  bool add = true;  // false: dst is overwritten
  // For a bf16 dst: the run's seed, this micro-step's number within the run, and the first element's index in the
  // model's flat gradient buffer. One call for the whole buffer and calls for its parts give the same bits.
  uint64_t seed = 0;
  int64_t micro_step = 0, first_element = 0;
};

// dst [n] f32 or bf16, added to, or overwritten without `add`  <-  src [n] f32 or bf16. (On the CPU f64 too, for both.)
// Added in f32 and rounded once. In bf16 a sum is rounded stochastically (kernels/common/stochastic.h), because
// rounding to nearest would lose addends smaller than 2^-9 of the sum; what overwrites dst is rounded to nearest, which
// loses nothing on average and has the smaller error.
void accumulate(Context&, Tensor dst, ConstTensor src, const AccumulateOptions& = {});

namespace cuda {
void accumulate(Context&, Tensor dst, ConstTensor src, const AccumulateOptions&);
}  // namespace cuda
}  // namespace triad
