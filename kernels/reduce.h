// Sums over a whole tensor in a fixed order: partial sums of fixed pieces, then the pieces in order, in double.
#pragma once
#include "engine/context.h"

namespace triad {

// out [1] f64, overwritten or (add) added to  <-  x: contiguous, any float dtype
void sum(Context&, Tensor out, ConstTensor x, bool add = false);
void sum_of_squares(Context&, Tensor out, ConstTensor x, bool add = false);

namespace cuda {
void sum(Context&, Tensor out, ConstTensor x, bool squares, bool add);
}  // namespace cuda
}  // namespace triad
