// What a decoding step ends with, where it must not wait for the host: the likeliest token, and the next position.
#pragma once
#include "engine/context.h"

namespace triad {

// token [N] i32 overwritten  <-  logits [N, >= vocab] T: the first of the largest among the first `vocab`; -1 where one
// of those is not finite.
void argmax(Context&, Tensor token, ConstTensor logits, int64_t vocab);
// position [N] i32: one further each, at most `last`.
void advance(Context&, Tensor position, int64_t last);

namespace cuda {
void argmax(Context&, Tensor token, ConstTensor logits, int64_t vocab);
void advance(Context&, Tensor position, int64_t last);
}  // namespace cuda
}  // namespace triad
