// Reads some memory and writes other, and does nothing else: what an op that is bound by memory is held against. A copy
// writes as much as it reads; few ops do, and the two do not cost the same: what is written stays in the L2 cache for a
// while, and goes to memory on the time of whatever comes next.
#pragma once
#include "engine/context.h"

namespace triad {

// written overwritten, every byte  <-  read, every byte: each vector of 16 bytes is the XOR of some that were read
// (zeros where nothing is). Contiguous, and a multiple of 16 bytes; either may be empty.
void traffic(Context&, Tensor written, ConstTensor read);

namespace cuda {
void traffic(Context&, Tensor written, ConstTensor read);
}
}  // namespace triad
