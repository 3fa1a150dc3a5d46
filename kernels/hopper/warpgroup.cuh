// Warpgroups in a CTA: four warps, 128 threads, which issue a wgmma together. Specialised kernels give each warpgroup a
// role (producer, MMA, epilogue), its own register count, and named barriers.
#pragma once
#include <cstdint>

namespace triad::cuda {

inline constexpr int kWarpgroup = 128;  // threads per warpgroup

// Sets this warpgroup's registers per thread (setmaxnreg), to fewer or more than at the launch. An increase waits until
// other warpgroups have released enough. The sum over all warpgroups must not exceed the launch's registers.
template <int kRegisters>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barriers for kThreads of the CTA's threads, ids 1 to 15 (0 is __syncthreads). named_barrier_sync() arrives and
// waits; named_barrier_arrive() only arrives.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Returns x, which must be equal in all of the warp's lanes, and lets the compiler rely on that.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __reduce_or_sync(0xffffffffu, x); }

// Lets a CTA's warpgroups take turns: 0, 1, ..., kWarpgroups - 1, 0, ... In nsa/sm90/forward.cuh they queue their
// products in turn, so one's products run while the others compute their softmax (FlashAttention-3's ping-pong). No
// turn may be left out. Uses kWarpgroups named barriers, from 1 + kWarpgroups on.
template <int kWarpgroups>
struct WarpgroupTurns {
  int w;  // this warpgroup's index in its CTA, from 0 to kWarpgroups - 1
  static constexpr int kFirstId = 1 + kWarpgroups;
  __device__ __forceinline__ static void signal(int to) { named_barrier_arrive<2 * kWarpgroup>(kFirstId + to); }
  __device__ __forceinline__ void begin() const {
    if (w == kWarpgroups - 1) signal(0);
  }
  __device__ __forceinline__ void wait() const { named_barrier_sync<2 * kWarpgroup>(kFirstId + w); }
  __device__ __forceinline__ void pass_on() const { signal(w + 1 == kWarpgroups ? 0 : w + 1); }
  __device__ __forceinline__ void end() const {  // consumes the last turn's signal
    if (w == 0) wait();
  }
};

}  // namespace triad::cuda
