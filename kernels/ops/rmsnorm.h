// RMSNorm: y = x * rrms * w with rrms = 1 / sqrt(mean(x^2) + eps), the mean over a row, in the acc type.
#pragma once
#include "engine/context.h"

namespace triad {

// y [N,C] T, rrms [N] acc, both overwritten  <-  x [N,C] T, w [C] T
void rmsnorm_forward(Context&, Tensor y, Tensor rrms, ConstTensor x, ConstTensor w, double eps);
// dx [N,C] T overwritten; dw [C] acc added to  <-  dy [N,C] T; x, w, rrms as in forward.
// dresidual [N,C] T, if given, is added to dx before rounding: the gradient from the residual connection around the
// norm. y [N,C] T, if given, is overwritten with forward's result, bit for bit: the next linear layer's weight gradient
// needs it, and recomputing it here saves a pass over x. dx and y may each be the same tensor as dy or dresidual.
void rmsnorm_backward(Context&, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor w, ConstTensor rrms,
                      ConstTensor dresidual = {}, Tensor y = {});

namespace cuda {
void rmsnorm_forward(Context&, Tensor y, Tensor rrms, ConstTensor x, ConstTensor w, double eps);
void rmsnorm_backward(Context&, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor w, ConstTensor rrms,
                      ConstTensor dresidual, Tensor y);
}  // namespace cuda
}  // namespace triad
