// A product across the rows of values (hopper/wgmma.cuh) that also sums its left operand: eight columns of ones beside
// the values' 64.
//
// The probabilities p of a row are rounded to bf16 for the product with the values. Where one of them outweighs the
// rest, o = sum p v / sum p shares its rounding error, up to 2^-9 along o itself, unless the sum has the same error:
// divided by the sum of the rounded p it cancels. Adding rounded numbers up by ordinary instructions takes two more a
// score: 6 to 18% of the forward kernels' time on an H200; so, it is 3% (values of 64 columns) to 7% (128).
#pragma once
#include "kernels/common/ptx.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace triad::cuda {

// 16 rows of a tile, all of them ones: one k16 step. It lies after the values in shared memory, 1024 bytes aligned.
inline constexpr int kOnesBytes = 16 * kPanelRowBytes;
__device__ __forceinline__ void write_ones(unsigned char* ones, int thread, int threads) {
  constexpr uint32_t kOnes = 0x3f803f80;  // two, bf16
  for (int i = 16 * thread; i < kOnesBytes; i += 16 * threads)
    *reinterpret_cast<uint4*>(ones + i) = make_uint4(kOnes, kOnes, kOnes, kOnes);
}

#define TRIAD_D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
// d[64 x 64] += a[64 x 16] values[16 x 64]; sums[64 x 8] += a[64 x 16] ones[16 x 8], eight columns alike. Addresses of
// shared memory: of the 16 rows, and of the ones, which to the product are the panel after those.
__device__ __forceinline__ void wgmma_add_and_sum(float (&d)[8][4], float (&sums)[4], const uint32_t (&a)[4],
                                                  uint32_t values, uint32_t ones) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %41, 0;\nmov.b64 b, {%40, %42};\n"
      "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%"
      "30,%31,%32,%33,%34,%35}, {%36,%37,%38,%39}, b, p, 1, 1, 1;\n}"
      : TRIAD_D4(0), TRIAD_D4(1), TRIAD_D4(2), TRIAD_D4(3), TRIAD_D4(4), TRIAD_D4(5), TRIAD_D4(6), TRIAD_D4(7),
        "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(tile_descriptor(values, static_cast<int>(ones - values))),
        "n"(1), "n"(kDescriptorHigh));
}
#undef TRIAD_D4

}  // namespace triad::cuda
