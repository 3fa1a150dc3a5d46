// Conversion between float types, rounded to nearest even: cast for contiguous tensors, upcast and downcast for strided
// ones.
#pragma once
#include "engine/context.h"

namespace triad {

// dst overwritten  <-  src: same shape, both contiguous, any two float dtypes (f64 on the CPU only).
void cast(Context&, Tensor dst, ConstTensor src);

// Copies floats in host memory to a contiguous tensor in any float dtype, and back, and synchronises ctx.stream. They
// are converted on the host, so that every device gets the same bits.
void write_floats(Context&, Tensor dst, const float* host);
void read_floats(Context&, float* host, ConstTensor src);

// cast takes contiguous tensors only, but the reference routes on a GPU (engine/routes.h) convert slices, such as q, k
// and v from one projection. On the CPU every route is the reference, so these functions exist on GPUs only.
//
// y f32, contiguous, overwritten  <-  x bf16, same shape, rank 2 or 4, innermost stride 1
void upcast(Context&, Tensor y, ConstTensor x);
// y bf16, rank 2 or 4, innermost stride 1, overwritten  <-  x f32, contiguous, plus the addend (bf16, may be strided
// like y) if given. Rounded once.
void downcast(Context&, Tensor y, ConstTensor x, ConstTensor addend = {});
// Returns an f32 copy of x in the scope's scratch, or x itself if it is f32.
ConstTensor upcasted(Context&, Scratch::Scope&, ConstTensor x);

namespace cuda {
void cast(Context&, Tensor dst, ConstTensor src);
void upcast(Context&, Tensor y, ConstTensor x);
void downcast(Context&, Tensor y, ConstTensor x, ConstTensor addend);
}  // namespace cuda
}  // namespace triad
