// Adds gradients to stored ones: the shares of a step's micro-batches, one after the other.
#pragma once
#include "engine/context.h"

namespace triad {

struct AccumulateOptions {
  bool add = true;  // false: dst is overwritten
  // For a bf16 dst: the run's seed, the number of this micro-step from the run's beginning, and the index of the first
  // element in the model's flat gradient buffer. One call for the whole buffer and calls for its parts give the same
  // bits.
  uint64_t seed = 0;
  int64_t micro_step = 0, first_element = 0;
};

// dst [n] f32 or bf16, added to, or overwritten without `add`  <-  src [n] f32 or bf16. (On the CPU f64 too, for both.)
// Added in f32 and rounded once. In bf16 a sum is rounded stochastically (kernels/common/stochastic.h), because to
// nearest the sum of many micro-steps would lose the addends that are smaller than 2^-9 of it; what overwrites dst is
// rounded to nearest, which loses nothing on average and has the smaller error.
void accumulate(Context&, Tensor dst, ConstTensor src, const AccumulateOptions& = {});

namespace cuda {
void accumulate(Context&, Tensor dst, ConstTensor src, const AccumulateOptions&);
}  // namespace cuda
}  // namespace triad
