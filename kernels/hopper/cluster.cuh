// Stores to the shared memory of the other CTAs of a cluster (st.async). As with the copy engine's loads, their bytes
// count at a barrier (hopper/mbarrier.cuh) of the CTA that receives them.
#pragma once
#include "kernels/hopper/mbarrier.cuh"

namespace triad::cuda {

// Stores x and y to `to` in the shared memory of CTA `cta` of the cluster, asynchronously, and then counts 8 bytes at
// barrier b of that CTA. `to` and b are addresses in this CTA's own shared memory; they have the same offsets there.
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
