// A linear layer of a decoding step, fused with the preceding RMSNorm and the following activation or residual. With so
// few rows it is bound by one read of the weights. On a GPU one kernel takes up to kMaxSkinnyRows rows; otherwise it
// runs the ops of the forward pass. Intermediate values are rounded as in these ops. On a GPU, the order of a sum's
// terms differs between one row, 2 to 8 rows and more. On a GPU, w and norm are read before the previous kernel has
// ended: an ordinary launch must separate this op from the kernel that wrote them (common/launch_pdl.cuh).
#pragma once
#include "engine/context.h"

namespace triad {

inline constexpr int64_t kMaxSkinnyRows = 8;

struct SkinnyLinearOptions {
  enum class Activation { none, silu, swiglu };
  ConstTensor norm = {};                     // [in] T: RMSNorm weights, applied to x first
  double eps = 0;                            // epsilon of the RMSNorm
  Activation activation = Activation::none;  // swiglu: silu(first half of the rows of w) * second half
  ConstTensor addend = {};                   // [N,out] T: added before rounding; may be y; not with an activation
};

// y [N,out] T overwritten  <-  x [N,in] T, w [out,in] T (swiglu: [2*out,in]); x must not be y
void skinny_linear(Context&, Tensor y, ConstTensor x, ConstTensor w, const SkinnyLinearOptions& = {});

namespace cuda {
// Returns false, without effect, if no kernel applies: too many rows, or rows that are not whole 16-byte vectors.
bool skinny_linear(Context&, Tensor y, ConstTensor x, ConstTensor w, const SkinnyLinearOptions&);
}  // namespace cuda
}  // namespace triad
