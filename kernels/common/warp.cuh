// Float reductions over a warp or an aligned part of it, in a fixed order: warp_* add the most distant lanes first,
// quad_* neighbouring ones. cub's warp reductions add neighbouring lanes first, so their sums over a warp would have
// other bits; integer sums use cub.
#pragma once

namespace triad::cuda {

inline constexpr unsigned kFullWarp = 0xffffffffu;  // all 32 lanes

// The sum over each aligned kLanes-lane group (a power of two), in every lane.
template <int kLanes = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = kLanes / 2; o > 0; o >>= 1) x += __shfl_xor_sync(kFullWarp, x, o);
  return x;
}
// The maximum over each aligned kLanes-lane group (a power of two), in every lane.
template <int kLanes = 32>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int o = kLanes / 2; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, o));
  return x;
}
// The maximum, or sum, over the four lanes that share an mma fragment's row, in each of them.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}
// The sum over the warp, valid in lane 0 only.
__device__ __forceinline__ double warp_sum_to_lane0(double x) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) x += __shfl_down_sync(kFullWarp, x, o);
  return x;
}

}  // namespace triad::cuda
