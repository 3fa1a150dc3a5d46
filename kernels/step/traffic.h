// Reads one tensor and writes another, and does nothing more. `triad bench` compares memory-bound ops with it. A copy
// would not be a fair comparison: few ops write as much as they read, and reads and writes differ in cost, since
// written lines stay in L2 and reach memory during the next kernel.
#pragma once
#include "engine/context.h"

namespace triad {

// written overwritten, every byte  <-  read, every byte. Each 16-byte vector written is the XOR of some vectors read
// (zeros if none were). Both are contiguous, in multiples of 16 bytes; either may be empty.
void traffic(Context&, Tensor written, ConstTensor read);

namespace cuda {
void traffic(Context&, Tensor written, ConstTensor read);
}
}  // namespace triad
