// Token embedding: y[i] = w[tokens[i]]. On a GPU, backward is limited to 2^31 - 1,025 tokens and 20,971,520 words in
// the vocabulary.
#pragma once
#include "engine/context.h"

namespace triad {

// y [N,C] T overwritten  <-  tokens [N] i32 in [0, V), w [V,C] T. Tokens outside this range are undefined behaviour;
// the data loader checks them.
void embedding_forward(Context&, Tensor y, ConstTensor tokens, ConstTensor w);
// dw [V,C] acc added to  <-  dy [N,C] T, tokens [N] i32. Equal tokens' rows are added in a fixed order, so every run
// gives the same bits.
void embedding_backward(Context&, Tensor dw, ConstTensor dy, ConstTensor tokens);

namespace cuda {
void embedding_forward(Context&, Tensor y, ConstTensor tokens, ConstTensor w);
void embedding_backward(Context&, Tensor dw, ConstTensor dy, ConstTensor tokens);
}  // namespace cuda
}  // namespace triad
