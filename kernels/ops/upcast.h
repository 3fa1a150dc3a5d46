// Operands of the reference routes on a GPU (engine/routes.h): bf16 tensors as f32 copies, and results rounded once.
// Unlike cast these take strides: q, k and v are parts of one projection's rows.
#pragma once
#include "engine/context.h"

namespace triad {

// wide f32, contiguous, overwritten  <-  x bf16 of the same shape, rank 2 or 4, any strides but the last
void upcast(Context&, Tensor wide, ConstTensor x);
// y bf16, strided likewise, overwritten  <-  wide f32, contiguous, plus the addend (bf16, strided likewise) where given
void downcast(Context&, Tensor y, ConstTensor wide, ConstTensor addend = {});
// A copy in scope; x itself if it is f32.
ConstTensor upcasted(Context&, Scratch::Scope&, ConstTensor x);

namespace cuda {
void upcast(Context&, Tensor wide, ConstTensor x);
void downcast(Context&, Tensor y, ConstTensor wide, ConstTensor addend);
}  // namespace cuda
}  // namespace triad
