// A decoding step's linear layer, fused with the RMSNorm before it and the activation or residual after it. With so few
// rows it is bound by reading the weights once. On a GPU one kernel computes up to kFewRows rows, in bf16 up
// to kMostRows (of large layers on Hopper alone); other calls run the forward pass's ops, and intermediate values
// are rounded as in these ops. Addition order on a GPU differs between one row, 2 to 8 rows, 9 to 64 and more rows; on
// the CPU a row has the same bits in every batch. The kernels read w and norm before the previous kernel has ended, so
// an ordinary launch must separate them from the kernel that wrote them (common/launch_pdl.cuh).
#pragma once
#include "engine/context.h"

namespace triad {

inline constexpr int64_t kFewRows = 8, kMostRows = 64;

struct SkinnyLinearOptions {
  enum class Activation { none, silu, swiglu };
  ConstTensor norm = {};                     // [in] T: weights for an RMSNorm that is applied to x first
  double eps = 0;                            // the RMSNorm's epsilon
  Activation activation = Activation::none;  // swiglu: silu(product with w's first half) * product with its second half
  ConstTensor addend =
      {};  // [N,out] T, added before rounding; may be y, or a bias's repeat_row(); not with an activation
};

// y [N,out] T overwritten  <-  x [N,in] T, w [out,in] T (swiglu: [2*out,in]); x must not be y
void skinny_linear(Context&, Tensor y, ConstTensor x, ConstTensor w, const SkinnyLinearOptions& = {});

namespace cuda {
// The fused kernels. Return false and do nothing if none applies: too many or too long rows, or rows that are not whole
// 16-byte vectors.
bool skinny_linear(Context&, Tensor y, ConstTensor x, ConstTensor w, const SkinnyLinearOptions&);
}  // namespace cuda
}  // namespace triad
