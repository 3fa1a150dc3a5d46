// Conversion of strided tensors between bf16 and f32, for the reference routes on a GPU (engine/routes.h). cast takes
// contiguous tensors only, but q, k and v are slices of the rows of one projection.
#pragma once
#include "engine/context.h"

namespace triad {

// y f32, contiguous, overwritten  <-  x bf16 of the same shape, rank 2 or 4, innermost stride 1
void upcast(Context&, Tensor y, ConstTensor x);
// y bf16, rank 2 or 4, innermost stride 1, overwritten  <-  x f32, contiguous, plus the addend (bf16, may be strided
// like y) if given. Rounded once.
void downcast(Context&, Tensor y, ConstTensor x, ConstTensor addend = {});
// Returns an f32 copy of x in the scope's scratch, or x itself if it is f32.
ConstTensor upcasted(Context&, Scratch::Scope&, ConstTensor x);

namespace cuda {
void upcast(Context&, Tensor y, ConstTensor x);
void downcast(Context&, Tensor y, ConstTensor x, ConstTensor addend);
}  // namespace cuda
}  // namespace triad
