// Additions to fp32 sums in global memory that do not return a value: the thread does not wait, and L2 adds.
#pragma once
#include <cstdint>

#include "kernels/common/ptx.cuh"

namespace triad::cuda {

// to[0], to[1] += x, y; `to` is 8-byte aligned.
__device__ __forceinline__ void add_pair(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
// to[0 .. 3] += x, y, z, w; `to` is 16-byte aligned.
__device__ __forceinline__ void add_four(float* to, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}
// Adds `bytes` of floats in shared memory to global memory by the copy engine, both 16-byte aligned. Part of a bulk
// group (hopper/tma.cuh): bulk_commit(), then bulk_wait_read() before `from` is overwritten.
__device__ __forceinline__ void add_bulk(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

}  // namespace triad::cuda
