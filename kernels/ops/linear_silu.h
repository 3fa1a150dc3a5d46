// A linear layer with a SiLU behind it, and the way back through the SiLU: each a product and the elementwise pass that
// follows it. As one op the pass is the product's epilogue, where a fused kernel exists (bf16 on Hopper): it hides
// behind the product, which leaves the memory idle.
#pragma once
#include "engine/context.h"

namespace triad {

// pre = x w^T, y = silu(pre): both [N,out] T overwritten  <-  x [N,in], w [out,in] T.
void linear_silu_forward(Context&, Tensor y, Tensor pre, ConstTensor x, ConstTensor w);
// Of z = y w_next^T, y = silu(pre): dpre = (dz w_next) silu'(pre), and y again, for which the gradient of w_next asks:
// both [N,hidden] T overwritten  <-  dz [N,out], w_next [out,hidden], pre [N,hidden] T.
void linear_silu_backward(Context&, Tensor dpre, Tensor y, ConstTensor dz, ConstTensor w_next, ConstTensor pre);

namespace cuda {
// False, and nothing done, where the fused kernel lacks the shape or the card.
bool linear_silu_forward_sm90(Context&, const Tensor& y, const Tensor& pre, const ConstTensor& x, const ConstTensor& w);
bool linear_silu_backward_sm90(Context&, const Tensor& dpre, const Tensor& y, const ConstTensor& dz,
                               const ConstTensor& w_next, const ConstTensor& pre);
}  // namespace cuda
}  // namespace triad
