// SiLU: y = x * sigmoid(x). SwiGLU: y = silu(gate) * up. All tensors are [N,H], dtype T; their rows may be strided.
#pragma once
#include "engine/context.h"

namespace triad {

// y [N,H] T overwritten  <-  x [N,H] T
void silu_forward(Context&, Tensor y, ConstTensor x);
// dx [N,H] T overwritten, may be dy or x itself  <-  dy, x [N,H] T. y [N,H] T, if given, is overwritten with forward's
// result, bit for bit, and may be dy itself: the next linear layer's weight gradient needs it, and recomputing it here
// saves a pass over x.
void silu_backward(Context&, Tensor dx, ConstTensor dy, ConstTensor x, Tensor y = {});
// y [N,H] T overwritten  <-  gate, up [N,H] T, which may be the two halves of one product's rows.
void swiglu_forward(Context&, Tensor y, ConstTensor gate, ConstTensor up);
// dgate, dup [N,H] T overwritten  <-  dy, gate, up [N,H] T. y [N,H] T, if given, is overwritten with forward's result,
// as in silu_backward(). Outputs may be inputs: y may be dy, dgate gate, and dup up.
void swiglu_backward(Context&, Tensor dgate, Tensor dup, ConstTensor dy, ConstTensor gate, ConstTensor up,
                     Tensor y = {});

namespace cuda {
void silu_forward(Context&, Tensor y, ConstTensor x);
void silu_backward(Context&, Tensor dx, ConstTensor dy, ConstTensor x, Tensor y);
void swiglu_forward(Context&, Tensor y, ConstTensor gate, ConstTensor up);
void swiglu_backward(Context&, Tensor dgate, Tensor dup, ConstTensor dy, ConstTensor gate, ConstTensor up, Tensor y);
}  // namespace cuda
}  // namespace triad
