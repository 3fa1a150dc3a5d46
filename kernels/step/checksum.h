// A number that tells whether two ranks hold the same bits: every 32-bit word times an odd weight of its place, summed
// modulo 2^64. A change of any one word changes it, and sums of integers have no order.
#pragma once
#include "engine/context.h"

namespace triad {

// out [1] i64, overwritten  <-  x: contiguous, whole words
void checksum(Context&, Tensor out, ConstTensor x);

// The weight of word i: odd, so that no power of two times it is 0.
constexpr uint64_t checksum_weight(uint64_t i) { return (i * 0x9E3779B97F4A7C15u) | 1u; }

namespace cuda {
void checksum(Context&, Tensor out, ConstTensor x);
}
}  // namespace triad
