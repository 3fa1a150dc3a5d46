// Row sums as part of a product: wgmma_add_and_sum (hopper/wgmma.cuh) reads eight columns of ones after the 64 columns
// of the values, and so returns sum p as well as sum p v, for p rounded to bf16.
//
// Where one probability of a row outweighs the rest, o = sum p v / sum p inherits its rounding error, up to 2^-9 along
// o itself, unless the divisor has the same error: dividing by the sum of the rounded p cancels it. Summing rounded
// numbers by ordinary instructions takes two more for each score, more than the eight columns cost.
#pragma once
#include "kernels/hopper/wgmma.cuh"

namespace triad::cuda {

// 16 rows of a tile, all ones: one step of 16 of k. The tile follows the values in shared memory, 1024-byte aligned.
inline constexpr int kOnesBytes = 16 * kPanelRowBytes;
__device__ __forceinline__ void write_ones(unsigned char* ones, int thread, int threads) {
  constexpr uint32_t kOnes = 0x3f803f80;  // 1.0 twice, in bf16
  for (int i = 16 * thread; i < kOnesBytes; i += 16 * threads)
    *reinterpret_cast<uint4*>(ones + i) = make_uint4(kOnes, kOnes, kOnes, kOnes);
}

}  // namespace triad::cuda
