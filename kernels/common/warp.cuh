// Reductions over a warp or an aligned part of it. Sums have a fixed order, which cub's warp reductions do not keep:
// they add neighbouring lanes first, these the most distant ones.
#pragma once

namespace triad::cuda {

inline constexpr unsigned kFullWarp = 0xffffffffu;  // the mask of all 32 lanes

// The sum over each aligned group of kLanes lanes (a power of two), in every lane.
template <int kLanes = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = kLanes / 2; o > 0; o >>= 1) x += __shfl_xor_sync(kFullWarp, x, o);
  return x;
}
// The maximum over each aligned group of kLanes lanes (a power of two), in every lane.
template <int kLanes = 32>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int o = kLanes / 2; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, o));
  return x;
}
// The sum over the warp, valid in lane 0 only. T: double or a 64-bit integer.
template <class T>
__device__ __forceinline__ T warp_sum_to_lane0(T x) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) x += __shfl_down_sync(kFullWarp, x, o);
  return x;
}

}  // namespace triad::cuda
