// A checksum by which tensors of different ranks are compared: the sum over all 32-bit words of word i times an odd
// weight of i, modulo 2^64. A change of a single word always changes it. The order of additions does not matter.
#pragma once
#include "engine/context.h"

namespace triad {

// out [1] i64, overwritten  <-  x: contiguous, a multiple of 4 bytes
void checksum(Context&, Tensor out, ConstTensor x);

// The weight of word i. It is odd, so the product with a nonzero 32-bit word is nonzero modulo 2^64.
constexpr uint64_t checksum_weight(uint64_t i) { return (i * 0x9E3779B97F4A7C15u) | 1u; }

namespace cuda {
void checksum(Context&, Tensor out, ConstTensor x);
}
}  // namespace triad
