// f32 copies of bf16 operands, and results rounded once to bf16, for the GPU's reference routes (engine/routes.h).
// Unlike cast these take strided tensors: q, k and v are slices of one projection's rows.
#pragma once
#include "engine/context.h"

namespace triad {

// y f32, contiguous, overwritten  <-  x bf16 of the same shape, rank 2 or 4, innermost stride 1
void upcast(Context&, Tensor y, ConstTensor x);
// y bf16, rank 2 or 4, innermost stride 1, overwritten  <-  x f32, contiguous, plus the addend (bf16, strided as y may
// be) if given
void downcast(Context&, Tensor y, ConstTensor x, ConstTensor addend = {});
// An f32 copy of x in the scope's scratch, or x itself if it is f32.
ConstTensor upcasted(Context&, Scratch::Scope&, ConstTensor x);

namespace cuda {
void upcast(Context&, Tensor y, ConstTensor x);
void downcast(Context&, Tensor y, ConstTensor x, ConstTensor addend);
}  // namespace cuda
}  // namespace triad
