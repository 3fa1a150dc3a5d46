// Sums the gradients of keys and values that NSA's three branches share (nsa.shared_kv).
#pragma once
#include "engine/context.h"

namespace triad {

// out [N,W] T overwritten  <-  parts [N,3*W] T: the cmp, sel and win branches' columns. Rows may be strided.
//   out = (cmp + sel) + win, in acc, rounded once. In bf16 each part was rounded by the kernel that wrote it.
void branch_sum(Context&, Tensor out, ConstTensor parts);

namespace cuda {
void branch_sum(Context&, Tensor out, ConstTensor parts);
}  // namespace cuda
}  // namespace triad
