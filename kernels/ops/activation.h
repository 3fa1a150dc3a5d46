// SiLU: y = x * sigmoid(x). SwiGLU: y = silu(gate) * up. All tensors are [N,H], dtype T; their rows may be strided.
#pragma once
#include "engine/context.h"
#include "kernels/ops/cast_e4m3.h"

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

// The same with the result in e4m3 alone: what cast_rows_e4m3() makes of y. On Hopper in one pass, for rows of up to
// kFusedCastColumns; others are computed and cast some rows at a time, with at most 32 MiB, or a row's, of scratch.
inline constexpr int64_t kFusedCastColumns = 16384;
void silu_forward_e4m3(Context&, const E4m3Rows& y, ConstTensor x);
void swiglu_forward_e4m3(Context&, const E4m3Rows& y, ConstTensor gate, ConstTensor up);
// As silu_backward() and swiglu_backward() with y, and both results in e4m3 alone. dpre [N,2H]: its first half is dgate
// and its second half dup; pre [N,2H] has gate and up likewise. A row of dx, or dpre, and the same row of y may lie in
// the memory of x's or pre's row.
void silu_backward_e4m3(Context&, const E4m3Rows& dx, const E4m3Rows& y, ConstTensor dy, ConstTensor x);
void swiglu_backward_e4m3(Context&, const E4m3Rows& dpre, const E4m3Rows& y, ConstTensor dy, ConstTensor pre);

namespace cuda {
// Return false and do nothing for rows that are too long or not aligned.
bool silu_forward_e4m3(Context&, const E4m3Rows& y, const ConstTensor& x);
bool swiglu_forward_e4m3(Context&, const E4m3Rows& y, const ConstTensor& gate, const ConstTensor& up);
bool silu_backward_e4m3(Context&, const E4m3Rows& dx, const E4m3Rows& y, const ConstTensor& dy, const ConstTensor& x);
bool swiglu_backward_e4m3(Context&, const E4m3Rows& dpre, const E4m3Rows& y, const ConstTensor& dy,
                          const ConstTensor& gate, const ConstTensor& up);
void silu_forward(Context&, Tensor y, ConstTensor x);
void silu_backward(Context&, Tensor dx, ConstTensor dy, ConstTensor x, Tensor y);
void swiglu_forward(Context&, Tensor y, ConstTensor gate, ConstTensor up);
void swiglu_backward(Context&, Tensor dgate, Tensor dup, ConstTensor dy, ConstTensor gate, ConstTensor up, Tensor y);
}  // namespace cuda
}  // namespace triad
