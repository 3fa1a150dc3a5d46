// Sums the gradients of keys and values that the three branches of NSA share (nsa.shared_kv).
#pragma once
#include "engine/context.h"

namespace triad {

// out [N,W] T overwritten  <-  parts [N,3*W] T: the columns of the branches cmp, sel, win. Rows may be strided.
//   out = (cmp + sel) + win, in acc, rounded once. In bf16 each part was rounded by the kernel that wrote it.
void branch_sum(Context&, Tensor out, ConstTensor parts);

namespace cuda {
void branch_sum(Context&, Tensor out, ConstTensor parts);
}  // namespace cuda
}  // namespace triad
