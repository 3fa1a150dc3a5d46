// Reads one tensor and writes another, and nothing more: the yardstick of `triad bench` for memory-bound ops. A copy
// would not do, since few ops write as much as they read, and reads and writes differ in cost: written lines stay in L2
// and reach memory later, at the cost of the next kernel.
#pragma once
#include "engine/context.h"

namespace triad {

// written overwritten, every byte  <-  read, every byte. Each 16-byte vector written is the XOR of some vectors read
// (zeros if none). Both contiguous and a multiple of 16 bytes; either may be empty.
void traffic(Context&, Tensor written, ConstTensor read);

namespace cuda {
void traffic(Context&, Tensor written, ConstTensor read);
}
}  // namespace triad
