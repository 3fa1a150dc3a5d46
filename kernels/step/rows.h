// Copies and sums of strided tensors: what moves and adds up keys, values and their gradients between ranks that share
// a sequence (model/context_group.h).
#pragma once
#include "engine/context.h"

namespace triad {

// y overwritten  <-  x: one shape of rank 2 to 4, innermost stride 1, any two float dtypes (f64 on the CPU only).
// Rounded to nearest even.
void copy_rows(Context&, Tensor y, ConstTensor x);
// y += x, in the dtype of both: f32, or f64 on the CPU. Shapes and strides as above.
void add_rows(Context&, Tensor y, ConstTensor x);

namespace cuda {
void copy_rows(Context&, Tensor y, ConstTensor x);
void add_rows(Context&, Tensor y, ConstTensor x);
}  // namespace cuda
}  // namespace triad
