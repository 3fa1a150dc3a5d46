// Stores to shared memory across a cluster's CTAs (st.async). Each store adds its bytes to a barrier
// (hopper/mbarrier.cuh) in the receiving CTA, as the copy engine's loads do.
#pragma once
#include "kernels/hopper/mbarrier.cuh"

namespace triad::cuda {

// Stores x and y to `to` in cluster CTA `cta`'s shared memory, asynchronously, and then counts 8 bytes at that CTA's
// barrier b. `to` and b are addresses in the calling CTA; the store uses the same offsets in CTA `cta`.
__device__ __forceinline__ void store_async_at(float2* to, Barrier* b, int cta, float x, float y) {
  asm volatile(
      "{\n.reg .b32 there, barrier;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 barrier, %1, "
      "%2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [barrier];\n}" ::"r"(
          shared_address(to)),
      "r"(shared_address(b)), "r"(cta), "f"(x), "f"(y)
      : "memory");
}

}  // namespace triad::cuda
