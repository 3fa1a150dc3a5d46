// The end of a decoding step on the device, without waiting for the host: the most likely token and the next position.
#pragma once
#include "engine/context.h"

namespace triad {

// token [N] i32 overwritten  <-  logits [N, >= vocab] T: the index of the largest of the first `vocab` logits, the
// lowest one if several are equal; -1 if any of these logits is not finite.
void argmax(Context&, Tensor token, ConstTensor logits, int64_t vocab);
// position [N] i32, each increased by one, up to `last`.
void advance(Context&, Tensor position, int64_t last);

namespace cuda {
void argmax(Context&, Tensor token, ConstTensor logits, int64_t vocab);
void advance(Context&, Tensor position, int64_t last);
}  // namespace cuda
}  // namespace triad
