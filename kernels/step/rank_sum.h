// Adds several ranks' contributions in rank order: the arithmetic in a reduce-scatter whose data were moved by copies
// (engine/comm/peer_copies.h).
#pragma once
#include "engine/context.h"

namespace triad {

// out [n] T or f32 overwritten  <-  own [n] T: this rank's contribution (may be out itself); parts [world,n] T: the
// ranks' contributions; row `rank` is not read. Added in the accumulator type, rounded once if out is T.
void rank_sum(Context&, Tensor out, ConstTensor own, ConstTensor parts, int64_t rank);

namespace cuda {
void rank_sum(Context&, Tensor out, ConstTensor own, ConstTensor parts, int64_t rank);
}  // namespace cuda
}  // namespace triad
