// Conversion between float types, rounded to nearest even.
#pragma once
#include "engine/context.h"

namespace triad {

// dst overwritten  <-  src: same shape, both contiguous, any two float dtypes (f64 on the CPU only).
void cast(Context&, Tensor dst, ConstTensor src);

namespace cuda {
void cast(Context&, Tensor dst, ConstTensor src);
}  // namespace cuda
}  // namespace triad
