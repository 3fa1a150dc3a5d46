// LoRA (arXiv 2106.09685): a low-rank product that is added to a linear layer's result, y += scale * (x A^T) B^T. The
// layer may be several projections of the same x, fused into one: each adapted one has an A and a B of its own, stored
// one after the other as rows of one matrix. Built from matmul: one product for all A, one for each B.
#pragma once
#include <span>

#include "engine/context.h"

namespace triad {

// The columns of y that an adapted projection writes: [begin, end).
struct LoraPiece {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

// Shapes, for m pieces and rank r: x [N,in] and y [N,out] T, any row stride; a [m*r,in] T; b [all pieces' columns,r] T;
// u = x A^T and its gradient [N,m*r] T.

// y added to  <-  x, a, b. Each sum is rounded to T once more than y was.
void lora_forward(Context&, Tensor y, ConstTensor x, ConstTensor a, ConstTensor b, std::span<const LoraPiece>,
                  double scale);
// du overwritten, dx [N,in] T added to  <-  dy [N,out] T, a, b
void lora_backward_input(Context&, Tensor dx, Tensor du, ConstTensor dy, ConstTensor a, ConstTensor b,
                         std::span<const LoraPiece>, double scale);
// da, db acc added to  <-  du from lora_backward_input(); dy, x, a. Computes u again.
void lora_backward_weight(Context&, Tensor da, Tensor db, ConstTensor du, ConstTensor dy, ConstTensor x, ConstTensor a,
                          std::span<const LoraPiece>, double scale);

}  // namespace triad
