// SiLU: y = x * sigmoid(x).  SwiGLU: y = silu(gate) * up.
#pragma once
#include "engine/context.h"

namespace triad {

// y [N,H] T overwritten  <-  x [N,H] T
void silu_forward(Context&, Tensor y, ConstTensor x);
// dx [N,H] T overwritten, may be dy itself  <-  dy, x [N,H] T. y [N,H] T, where given, is overwritten with forward's
// result, bit for bit: the weights of the product behind the activation need it again, and x passes by here anyway.
void silu_backward(Context&, Tensor dx, ConstTensor dy, ConstTensor x, Tensor y = {});
// y [N,H] T overwritten  <-  gate, up [N,H] T (rows may be strided: halves of one product)
void swiglu_forward(Context&, Tensor y, ConstTensor gate, ConstTensor up);
// dgate, dup [N,H] T overwritten  <-  dy, gate, up [N,H] T. y as above; y may be dy itself.
void swiglu_backward(Context&, Tensor dgate, Tensor dup, ConstTensor dy, ConstTensor gate, ConstTensor up,
                     Tensor y = {});

namespace cuda {
void silu_forward(Context&, Tensor y, ConstTensor x);
void silu_backward(Context&, Tensor dx, ConstTensor dy, ConstTensor x, Tensor y);
void swiglu_forward(Context&, Tensor y, ConstTensor gate, ConstTensor up);
void swiglu_backward(Context&, Tensor dgate, Tensor dup, ConstTensor dy, ConstTensor gate, ConstTensor up, Tensor y);
}  // namespace cuda
}  // namespace triad
