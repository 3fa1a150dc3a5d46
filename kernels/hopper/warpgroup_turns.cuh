// Whose products come next, among the warpgroups of a CTA.
#pragma once
#include "kernels/hopper/wgmma.cuh"

namespace triad::cuda {

// Warpgroups of a CTA take turns to queue their products, one turn a step, so that a warpgroup's products run at once
// while the others weigh, and not a little of everybody's. Each takes as many turns of a tile as it has steps, seen or
// not. (The attention branches' forward, left to themselves: 1 to 4% slower on an H200,
// compressed 1 x 65536 x 64 x 4 x 128 1% faster.)
template <int kWarpgroups>
struct WarpgroupTurns {
  int w;
  // Of the named barriers: a warpgroup's own is 1 + w.
  static constexpr int kFirstId = 1 + kWarpgroups;
  __device__ __forceinline__ static void give(int to) {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstId + to), "n"(2 * kWarpgroup) : "memory");
  }
  __device__ __forceinline__ void begin() const {
    if (w == kWarpgroups - 1) give(0);
  }
  __device__ __forceinline__ void wait() const {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstId + w), "n"(2 * kWarpgroup) : "memory");
  }
  __device__ __forceinline__ void pass_on() const { give(w + 1 == kWarpgroups ? 0 : w + 1); }
  __device__ __forceinline__ void end() const {  // takes the last turn that was given
    if (w == 0) wait();
  }
};

}  // namespace triad::cuda
