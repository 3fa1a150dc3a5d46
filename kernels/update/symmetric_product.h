// Matrices times their own transposes, which are symmetric products:
//   D = alpha X X^T + addend, or D = alpha X^T X + addend
// On Hopper in bf16 a kernel computes the tiles of D on and below the diagonal, and stores each a second time,
// transposed, above it. Everywhere else it is an ordinary batched product. For a symmetric X, D is the square X X.
#pragma once
#include "engine/context.h"

namespace triad {

struct SymmetricProductOptions {
  bool trans = false;  // X^T X instead of X X^T
  double alpha = 1.0;
};

// d [n,S,S] T overwritten, no other tensor may overlap it  <-  x [n,S,K] T, or [n,K,S] with trans; addend [n,S,S] T, if
// given: symmetric, added before the single rounding. All contiguous. Sums are in acc.
void symmetric_product(Context&, Tensor d, ConstTensor x, const SymmetricProductOptions& = {}, ConstTensor addend = {});

namespace cuda {
// The kernel for Hopper. Returns false and does nothing if it does not support the shape or the card.
bool symmetric_product_sm90(Context&, const Tensor& d, const ConstTensor& x, const SymmetricProductOptions&,
                            const ConstTensor& addend);
}  // namespace cuda
}  // namespace triad
