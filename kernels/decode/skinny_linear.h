// A linear layer of a decoding step, with the norm in front of it and the activation or the residual behind: its rows
// are few, so all of its time is reading the weights once. On a GPU one kernel for up to kFewRows rows; elsewhere the
// ops of the forward pass. What they round in between is rounded here too. There, one row, 2 to 8 and more add a sum's
// terms in different orders. On a GPU w and norm are read before the kernel queued ahead has ended: what wrote them is
// to lie behind an ordinary kernel (common/launch_pdl.cuh).
#pragma once
#include "engine/context.h"

namespace triad {

inline constexpr int64_t kFewRows = 8;

struct SkinnyLinearOptions {
  enum class Activation { none, silu, swiglu };
  ConstTensor norm = {};                     // [in] T: x is RMSNorm'd first, times this
  double eps = 0;                            // of the norm
  Activation activation = Activation::none;  // swiglu: silu(first half of the rows of w) * second half
  ConstTensor addend = {};                   // [N,out] T: added before rounding; may be y; not with an activation
};

// y [N,out] T overwritten  <-  x [N,in] T, w [out,in] T (swiglu: [2*out,in]); x is not y
void skinny_linear(Context&, Tensor y, ConstTensor x, ConstTensor w, const SkinnyLinearOptions& = {});

namespace cuda {
// False, and nothing done, where there is no kernel for it: many rows, or rows that are no whole vectors.
bool skinny_linear(Context&, Tensor y, ConstTensor x, ConstTensor w, const SkinnyLinearOptions&);
}  // namespace cuda
}  // namespace triad
