// Barriers in shared memory (mbarrier) between a producer and its consumers. A phase completes after the expected
// arrivals, and after the copy engine and st.async (hopper/cluster.cuh) have written all bytes that barrier_expect()
// added; then the next phase begins. A wait passes the phase's parity: 0 for the first phase, 1 for the second, 0 for
// the third, and so on.
//
// A ring has two barriers per slot: full[] completes when the producer has written the slot, empty[] when the consumers
// have read it.
#pragma once
#include <cstdint>

#include "kernels/common/ptx.cuh"

namespace triad::cuda {

using Barrier = uint64_t;

__device__ __forceinline__ void barrier_init(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the cluster. Call it after barrier_init() and before a
// CTA or cluster barrier.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Arrives `count` times.
__device__ __forceinline__ void barrier_arrive(Barrier* b, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
// Arrives once for the whole warp, after all lanes.
__device__ __forceinline__ void barrier_arrive_warp(Barrier* b) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(b);
}
// Arrives when all cp.async copies that this thread has begun are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(Barrier* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
// Arrives at the same barrier in cluster CTA `cta`. This orders the warp's earlier shared-memory reads before the
// arrival, within this CTA, and does not wait for its other memory operations.
__device__ __forceinline__ void barrier_arrive_at(Barrier* b, int cta) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(b)),
      "r"(cta)
      : "memory");
}
// Arrives once, and makes the phase wait for `bytes` more bytes from the copy engine or st.async (expect_tx).
__device__ __forceinline__ void barrier_expect(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}

// Blocks until the phase with this parity is complete.
__device__ __forceinline__ void barrier_wait(Barrier* b, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra arrived;\nbra again;\narrived:\n}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}

}  // namespace triad::cuda
