// Conversion between float types, rounded to nearest even.
#pragma once
#include "engine/context.h"

namespace triad {

// dst overwritten  <-  src: same shape, both contiguous, any two float dtypes (f64 on the CPU only).
void cast(Context&, Tensor dst, ConstTensor src);

// Copies floats in host memory to a contiguous tensor of any float dtype, and back, and synchronises ctx.stream. They
// are converted on the host, so that every device gets the same bits.
void write_floats(Context&, Tensor dst, const float* host);
void read_floats(Context&, float* host, ConstTensor src);

namespace cuda {
void cast(Context&, Tensor dst, ConstTensor src);
}  // namespace cuda
}  // namespace triad
