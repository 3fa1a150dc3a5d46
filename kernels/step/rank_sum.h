// What several ranks have of the same elements, added in the order of ranks: the sums of a reduce-scatter whose parts
// were only copied (engine/comm/peer_copies.h).
#pragma once
#include "engine/context.h"

namespace triad {

// out [n] T overwritten  <-  own [n] T: this rank's share, which may be out; parts [world,n] T: the ranks' shares, of
// which row `rank` is not read. Added in acc, rounded once.
void rank_sum(Context&, Tensor out, ConstTensor own, ConstTensor parts, int64_t rank);

namespace cuda {
void rank_sum(Context&, Tensor out, ConstTensor own, ConstTensor parts, int64_t rank);
}  // namespace cuda
}  // namespace triad
