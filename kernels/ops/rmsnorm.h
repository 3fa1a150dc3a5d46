// RMSNorm: y = x * rrms * w with rrms = 1 / sqrt(mean(x^2) + eps), the mean over a row, in the acc type.
#pragma once
#include "engine/context.h"
#include "kernels/ops/cast_e4m3.h"

namespace triad {

// y [N,C] T, rrms [N] acc, both overwritten  <-  x [N,C] T, w [C] T
void rmsnorm_forward(Context&, Tensor y, Tensor rrms, ConstTensor x, ConstTensor w, double eps);
// dx [N,C] T overwritten; dw [C] acc added to  <-  dy [N,C] T; x, w, rrms as in forward.
// dresidual [N,C] T, if given, is added to dx before rounding: the gradient from the residual connection around the
// norm. y [N,C] T, if given, is overwritten with forward's result, bit for bit: the next linear layer's weight gradient
// needs it, and recomputing it here saves a pass over x. dx and y may each be the same tensor as dy or dresidual.
void rmsnorm_backward(Context&, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor w, ConstTensor rrms,
                      ConstTensor dresidual = {}, Tensor y = {});
// rmsnorm_forward() with its result in e4m3 alone: what cast_rows_e4m3() makes of y. On a GPU in one pass.
void rmsnorm_forward_e4m3(Context&, const E4m3Rows& y, Tensor rrms, ConstTensor x, ConstTensor w, double eps);

namespace cuda {
// Returns false and does nothing for rows that are not aligned.
bool rmsnorm_forward_e4m3(Context&, const E4m3Rows& y, const Tensor& rrms, const ConstTensor& x, const ConstTensor& w,
                          double eps);
void rmsnorm_forward(Context&, Tensor y, Tensor rrms, ConstTensor x, ConstTensor w, double eps);
void rmsnorm_backward(Context&, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor w, ConstTensor rrms,
                      ConstTensor dresidual, Tensor y);
}  // namespace cuda
}  // namespace triad
