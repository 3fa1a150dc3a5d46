// Probability sums within a product: wgmma_add_and_sum() (hopper/wgmma.cuh) reads eight columns of ones after the 64
// value columns, and so computes sum p as well as sum p v, for p rounded to bf16.
//
// The output o = sum p v / sum p has p's relative rounding error, up to 2^-9, in a row where one p outweighs the
// others, unless the divisor has the same error. Dividing by the sum of the rounded p cancels it. Adding rounded
// numbers by ordinary instructions would take two more for each score, which costs more than the eight columns.
#pragma once
#include "kernels/hopper/wgmma.cuh"

namespace triad::cuda {

// Writes a tile with 16 rows of ones, one step in k. It follows the values in shared memory and is aligned to 1024
// bytes. Each of `threads` threads calls it with its number.
inline constexpr int kOnesBytes = 16 * kPanelRowBytes;
__device__ __forceinline__ void write_ones(unsigned char* ones, int thread, int threads) {
  constexpr uint32_t kOnes = 0x3f803f80;  // two bf16 numbers 1.0
  for (int i = 16 * thread; i < kOnesBytes; i += 16 * threads)
    *reinterpret_cast<uint4*>(ones + i) = make_uint4(kOnes, kOnes, kOnes, kOnes);
}

}  // namespace triad::cuda
