// The transpose of e4m3 rows on the GPU, bound by memory: one byte read and one written an element. One CTA finds the
// common scale. Then a CTA has a tile of 128 rows and 128 columns: a thread loads 4 columns of 4 rows at a time, scales
// them as halves, which hold every e4m3 times a power of two down to 2^-24 (below 2^-10, e4m3 has only zero), and
// transposes the 4x4 bytes in registers. Shared memory holds words of 4 rows, from which rows of the result are stored.
#include "kernels/ops/transpose_e4m3.h"

#include <cuda_fp8.h>

#include "kernels/common/launch.cuh"
#include "kernels/common/warp.cuh"

namespace triad::cuda {
namespace {

constexpr int kScaleThreads = 1024;
__global__ void __launch_bounds__(kScaleThreads)
    largest_scale_kernel(uint32_t* __restrict__ largest, const uint32_t* __restrict__ scales, int N) {
  __shared__ uint32_t warp_results[kScaleThreads / 32];
  uint32_t mine = 0;
  for (int i = threadIdx.x; i < N; i += kScaleThreads) mine = max(mine, scales[i]);
  mine = __reduce_max_sync(kFullWarp, mine);
  if (threadIdx.x % 32 == 0) warp_results[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x < 32) mine = __reduce_max_sync(kFullWarp, warp_results[threadIdx.x]);
  if (threadIdx.x == 0) *largest = mine;
}

// Four e4m3, each times `factor`, a power of two or 0.
__device__ __forceinline__ uint32_t scaled(uint32_t bytes, __half2 factor) {
  uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(bytes >> 16 * i);
    const __half2 x = __hmul2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)), factor);
    result |= uint32_t{__nv_cvt_halfraw2_to_fp8x2(static_cast<__half2_raw>(x), __NV_SATFINITE, __NV_E4M3)} << 16 * i;
  }
  return result;
}

constexpr int kTile = 128, kTileWords = kTile / 4, kPitch = kTileWords + 1, kWarps = 8;
__global__ void __launch_bounds__(32 * kWarps)
    transpose_e4m3_kernel(uint8_t* __restrict__ to, const uint8_t* __restrict__ from,
                          const float* __restrict__ row_scales, const float* __restrict__ common, int N, int K,
                          int padded) {
  __shared__ uint32_t tile[kTile * kPitch];  // [column][4 rows]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile, column = first_column + 4 * lane;
  const float scale = *common;
  const bool is_nan = !(scale == scale);
  for (int group = warp; group < kTileWords; group += kWarps) {
    uint32_t x[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = first_row + 4 * group + r;
      const bool exists = row < N && column < K;
      x[r] = exists ? *reinterpret_cast<const uint32_t*>(from + int64_t{row} * K + column) : 0;
      if (exists) x[r] = is_nan ? 0x01010101u * kE4m3Nan : scaled(x[r], __float2half2_rn(row_scales[row] / scale));
    }
    // Word j: byte j of each of the four rows.
    const uint32_t low01 = __byte_perm(x[0], x[1], 0x5140), high01 = __byte_perm(x[0], x[1], 0x7362);
    const uint32_t low23 = __byte_perm(x[2], x[3], 0x5140), high23 = __byte_perm(x[2], x[3], 0x7362);
    const uint32_t words[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                               __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
    // Lanes 8 apart begin with different words, so that a warp's 32 are in 32 banks.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = (i + lane / 8) % 4;
      const uint32_t word = j == 0 ? words[0] : j == 1 ? words[1] : j == 2 ? words[2] : words[3];
      tile[(4 * lane + j) * kPitch + group] = word;
    }
  }
  __syncthreads();
  const int row = first_row + 4 * lane;
  if (row >= padded) return;
  for (int c = warp; c < min(kTile, K - first_column); c += kWarps)
    *reinterpret_cast<uint32_t*>(to + int64_t{first_column + c} * padded + row) = tile[c * kPitch + lane];
}

}  // namespace

void transpose_e4m3(Context& ctx, const E4m3Columns& columns, const E4m3Rows& rows) {
  const int N = static_cast<int>(rows.q.size(0)), K = static_cast<int>(rows.q.size(1)),
            padded = static_cast<int>(columns.q.size(1));
  const float* const scales = rows.scale.ptr<float>();
  float* const common = columns.scale.ptr<float>();
  launch(ctx, "transpose_e4m3 scale", largest_scale_kernel, dim3(1), dim3(kScaleThreads), 0,
         reinterpret_cast<uint32_t*>(common), reinterpret_cast<const uint32_t*>(scales), N);
  launch(ctx, "transpose_e4m3", transpose_e4m3_kernel,
         dim3(static_cast<unsigned>(ceil_div(K, kTile)), static_cast<unsigned>(ceil_div(padded, kTile))),
         dim3(32 * kWarps), 0, columns.q.ptr<uint8_t>(), rows.q.ptr<uint8_t>(), scales, common, N, K, padded);
}

}  // namespace triad::cuda
