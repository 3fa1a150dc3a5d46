// Multiplies by a number and converts between float types; both tensors may be strided.
#pragma once
#include "engine/context.h"

namespace triad {

// y = factor * x, rounded once. y overwritten  <-  x, both [B,T,H,D] with innermost stride 1, in any two float dtypes
// with one accumulator type (T and acc). x's gradient is the same op: dx = factor * dy. add: y += factor * x.
void scale(Context&, Tensor y, ConstTensor x, double factor, bool add = false);

namespace cuda {
void scale(Context&, Tensor y, ConstTensor x, double factor, bool add);
}  // namespace cuda
}  // namespace triad
