// A checksum that compares tensors across ranks: the sum, over all 32-bit words i, of word i times an odd weight for i,
// modulo 2^64. Changing a single word always changes it. Addition order does not matter.
#pragma once
#include "engine/context.h"

namespace triad {

// out [1] i64, overwritten  <-  x: contiguous, a multiple of 4 bytes
void checksum(Context&, Tensor out, ConstTensor x);

// Word i's weight. It is odd, so the product with a nonzero 32-bit word is nonzero modulo 2^64.
constexpr uint64_t checksum_weight(uint64_t i) { return (i * 0x9E3779B97F4A7C15u) | 1u; }

namespace cuda {
void checksum(Context&, Tensor out, ConstTensor x);
}
}  // namespace triad
