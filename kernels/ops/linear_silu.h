// A linear layer followed by SiLU or SwiGLU, forward, and its backward through the activation. Each is a matrix product
// and an elementwise pass. On Hopper in bf16, one fused kernel does the pass in the product's epilogue, where its
// memory traffic overlaps with the product.
#pragma once
#include "engine/context.h"

namespace triad {

// pre = x w^T, y = silu(pre): both [N,out] T overwritten  <-  x [N,in], w [out,in] T.
void linear_silu_forward(Context&, Tensor y, Tensor pre, ConstTensor x, ConstTensor w);
// Computes dpre, pre's gradient, where y = silu(pre), z = y w_next^T, and dz is z's gradient:
// dpre = (dz w_next) silu'(pre). Also computes y again, for w_next's gradient, which the caller computes. dpre, y
// [N,hidden] T overwritten  <-  dz [N,out], w_next [out,hidden], pre [N,hidden] T. dpre may be pre itself.
void linear_silu_backward(Context&, Tensor dpre, Tensor y, ConstTensor dz, ConstTensor w_next, ConstTensor pre);

// pre = x w^T, y = silu(gate) * up, where gate is the first half of pre's columns, and up is the second half:
// y [N,hidden], pre [N,2 hidden] T overwritten  <-  x [N,in], w [2 hidden,in] T.
void linear_swiglu_forward(Context&, Tensor y, Tensor pre, ConstTensor x, ConstTensor w);
// Computes dpre, pre's gradient, where y = silu(gate) * up, z = y w_next^T, and dz is z's gradient. The first half of
// dpre's columns is gate's gradient, dy * up * silu'(gate) with dy = dz w_next. The second half is up's gradient, dy *
// silu(gate). Also computes y again, for w_next's gradient, which the caller computes. dpre [N,2 hidden], y [N,hidden]
// T overwritten  <-  dz [N,out], w_next [out,hidden], pre [N,2 hidden] T. dpre may be pre.
void linear_swiglu_backward(Context&, Tensor dpre, Tensor y, ConstTensor dz, ConstTensor w_next, ConstTensor pre);

namespace cuda {
// The fused kernels. Return false and do nothing if they do not support the shape or the card.
bool linear_silu_forward_sm90(Context&, const Tensor& y, const Tensor& pre, const ConstTensor& x, const ConstTensor& w);
bool linear_silu_backward_sm90(Context&, const Tensor& dpre, const Tensor& y, const ConstTensor& dz,
                               const ConstTensor& w_next, const ConstTensor& pre);
bool linear_swiglu_forward_sm90(Context&, const Tensor& y, const Tensor& pre, const ConstTensor& x,
                                const ConstTensor& w);
bool linear_swiglu_backward_sm90(Context&, const Tensor& dpre, const Tensor& y, const ConstTensor& dz,
                                 const ConstTensor& w_next, const ConstTensor& pre);
}  // namespace cuda
}  // namespace triad
