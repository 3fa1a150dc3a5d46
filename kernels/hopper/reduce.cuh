// Additions to floats in global memory that return no value, so the thread does not wait for them: L2 performs the
// addition.
#pragma once
#include <cstdint>

#include "kernels/common/ptx.cuh"

namespace triad::cuda {

// Adds x, y to to[0], to[1]; `to` is aligned to 8 bytes.
__device__ __forceinline__ void add_pair(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
// Adds x, y, z, w to to[0 .. 3]; `to` is aligned to 16 bytes.
__device__ __forceinline__ void add_four(float* to, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}
// The copy engine adds `bytes` bytes of floats from shared to global memory; both are aligned to 16 bytes. The addition
// belongs to this thread's next bulk group (hopper/tma.cuh): call bulk_commit() after it, and bulk_wait_read() before
// `from` is overwritten.
__device__ __forceinline__ void add_bulk(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

}  // namespace triad::cuda
