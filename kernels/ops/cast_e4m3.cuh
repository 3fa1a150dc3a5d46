// Casts of bf16 rows to e4m3 for device code: a row's largest element, its scale, and bytes. Multiplying by 1 / scale
// is exact, and cvt.rn.satfinite rounds as to_e4m3() (ops/cast_e4m3.h) does.
#pragma once
#include <cuda_fp8.h>

#include "kernels/common/bthd.cuh"
#include "kernels/ops/cast_e4m3.h"

namespace triad::cuda {

inline constexpr int kE4m3Vector = kVector<__nv_bfloat16>;  // elements of a 16-byte vector, cast to 8 bytes

__device__ __forceinline__ uint32_t size_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// A row's scale, from the bits of its largest element's size.
struct E4m3Scale {
  uint32_t bits;
  float inverse;
  __device__ explicit E4m3Scale(uint32_t largest) {
    bits = e4m3_scale_bits(largest);
    inverse = __uint_as_float(e4m3_inverse_bits(bits));
  }
  __device__ float value() const { return __uint_as_float(bits); }
  __device__ bool is_nan() const { return bits > 0x7f800000u; }
  // Two elements' bytes; the low one's is the lower byte.
  __device__ uint32_t cast(float low, float high) const {
    if (is_nan()) return uint32_t{kE4m3Nan} << 8 | kE4m3Nan;
    return __nv_cvt_float2_to_fp8x2(make_float2(low * inverse, high * inverse), __NV_SATFINITE, __NV_E4M3);
  }
  __device__ uint8_t cast(float x) const { return static_cast<uint8_t>(cast(x, 0.0f)); }
  __device__ uint2 cast(const uint4& vector) const {
    float x[kE4m3Vector];
    as_floats<__nv_bfloat16>(x, vector);
    return {cast(x[0], x[1]) | cast(x[2], x[3]) << 16, cast(x[4], x[5]) | cast(x[6], x[7]) << 16};
  }
};

// The bits of the largest size in a bf16 vector as a float's, whose upper half they are; two maxima at a time.
__device__ __forceinline__ uint32_t largest_of(const uint4& vector) {
  constexpr uint32_t kSizes = 0x7fff7fffu;
  const uint32_t two =
      __vmaxu2(__vmaxu2(vector.x & kSizes, vector.y & kSizes), __vmaxu2(vector.z & kSizes, vector.w & kSizes));
  return max(two << 16, two & 0xffff0000u);
}
__device__ __forceinline__ uint32_t warp_largest(uint32_t x) { return __reduce_max_sync(kFullWarp, x); }
// The largest of each value in a CTA of whole warps, in every thread. Call it once in a kernel.
template <int kCount>
__device__ __forceinline__ void block_largest(uint32_t (&x)[kCount]) {
  __shared__ uint32_t warp_results[kCount][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    x[i] = warp_largest(x[i]);
    if (lane == 0) warp_results[i][warp] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) x[i] = warp_largest(lane < warps ? warp_results[i][lane] : 0);
}
__device__ __forceinline__ uint32_t block_largest(uint32_t x) {
  uint32_t one[1] = {x};
  block_largest(one);
  return one[0];
}

// Eight floats rounded to a bf16 vector.
__device__ __forceinline__ uint4 packed(const float (&x)[kE4m3Vector]) {
  uint4 vector;
  store_vector<kE4m3Vector>(reinterpret_cast<__nv_bfloat16*>(&vector), x);
  return vector;
}

// Calls f.template operator()<n>(threads): for a CTA per row whose threads hold n vectors each, n as small as at most
// 512 threads allow and at most 8. Returns false if that is too few for the row.
template <class F>
bool dispatch_held_vectors(int64_t vectors, F&& f) {
  constexpr int64_t kMostThreads = 512;
  const auto threads = [&](int64_t held) { return static_cast<unsigned>(round_up(ceil_div(vectors, held), 32)); };
  if (vectors <= kMostThreads)
    f.template operator()<1>(threads(1));
  else if (vectors <= 2 * kMostThreads)
    f.template operator()<2>(threads(2));
  else if (vectors <= 4 * kMostThreads)
    f.template operator()<4>(threads(4));
  else if (vectors <= 8 * kMostThreads)
    f.template operator()<8>(threads(8));
  else
    return false;
  return true;
}

}  // namespace triad::cuda
