// y[i] = w[tokens[i]]. On a GPU backward takes up to 2^31 - 1,024 tokens of a vocabulary of up to 20,971,520.
#pragma once
#include "engine/context.h"

namespace triad {

// y [N,C] T overwritten  <-  tokens [N] i32 in [0, V), w [V,C] T. A token outside has no defined result: the loader
// checks.
void embedding_forward(Context&, Tensor y, ConstTensor tokens, ConstTensor w);
// dw [V,C] acc added to  <-  dy [N,C] T, tokens [N] i32. Rows of equal tokens are summed in a fixed order:
// deterministic.
void embedding_backward(Context&, Tensor dw, ConstTensor dy, ConstTensor tokens);

namespace cuda {
void embedding_forward(Context&, Tensor y, ConstTensor tokens, ConstTensor w);
void embedding_backward(Context&, Tensor dw, ConstTensor dy, ConstTensor tokens);
}  // namespace cuda
}  // namespace triad
