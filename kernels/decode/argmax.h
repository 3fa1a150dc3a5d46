// A decoding step's last ops: the most likely token and the next position, computed on the device, so that the host
// need not wait.
#pragma once
#include "engine/context.h"

namespace triad {

// token [N] i32 overwritten  <-  logits [N, at least vocab] T. For each row, the index of the largest among the first
// `vocab` logits; in a tie, the lowest such index; -1 if one of these logits is not finite.
void argmax(Context&, Tensor token, ConstTensor logits, int64_t vocab);
// position [N] i32: each is increased by one, but not above `last`.
void advance(Context&, Tensor position, int64_t last);

namespace cuda {
void argmax(Context&, Tensor token, ConstTensor logits, int64_t vocab);
void advance(Context&, Tensor position, int64_t last);
}  // namespace cuda
}  // namespace triad
