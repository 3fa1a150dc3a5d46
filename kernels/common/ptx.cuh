// PTX instructions for sm_80 and later, one named function for each.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>
#include <numbers>

namespace triad::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// The start of the kernel's dynamic shared memory, aligned to 16 bytes.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return bytes;
}

// Copies 16 bytes from global to shared memory asynchronously (cp.async), bypassing L1: the first `valid` bytes, then
// zeros. Both addresses must be aligned to 16 bytes.
__device__ __forceinline__ void copy_async_16(void* to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid)
               : "memory");
}
// Copies 4 bytes from global to shared memory asynchronously (cp.async), through L1. Writes zeros if `valid` is false.
__device__ __forceinline__ void copy_async_4(void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0)
               : "memory");
}
// Copies 8 bytes in the same way. Both addresses must be aligned to 8 bytes.
__device__ __forceinline__ void copy_async_8(void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 8 : 0)
               : "memory");
}
// Waits for all asynchronous copies of this thread. Other threads see the data after a barrier.
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// copy_async_commit() groups this thread's copies since the last commit. copy_async_wait_group() waits until at most
// kPending groups are in flight.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ldmatrix: loads four 8x8 16-bit matrices from shared memory. Lanes 8i .. 8i+7 pass matrix i's row addresses. From
// each matrix, a lane receives row lane/4, columns 2*(lane%4) and +1; transposed: column lane/4, rows 2*(lane%4) and
// +1.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const __nv_bfloat16* row) {
  load_matrices(r, shared_address(row));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const __nv_bfloat16* row) {
  load_matrices_transposed(r, shared_address(row));
}

// Barrier for a cluster's threads on sm_90; does nothing on other cards. Writes before it, to global memory too, are
// visible after it. Such global memory must be read with __ldcg, since L1 may hold stale lines.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Reads shared memory of the cluster's CTA number `rank`, at the place that `p` has in this CTA's, on sm_90; on other
// cards, without clusters, this CTA's. sync_cluster() orders the read after the writes.
__device__ __forceinline__ float load_from_cta(const float* p, int rank) {
#if __CUDA_ARCH__ >= 900
  float x;
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
               : "=f"(x)
               : "r"(shared_address(p)), "r"(rank));
  return x;
#else
  return *p;
#endif
}
// The same for four floats, aligned to 16 bytes.
__device__ __forceinline__ float4 load_from_cta(const float4* p, int rank) {
#if __CUDA_ARCH__ >= 900
  float4 x;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, "
      "[there];\n}"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(shared_address(p)), "r"(rank));
  return x;
#else
  return *p;
#endif
}

// A warp's tensor-core product c[16x8] += a[16x16] b[16x8]; bf16 operands, fp32 sums.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Packs two floats, rounded to bf16, into a word; `low` is in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

inline constexpr float kLog2e = std::numbers::log2e_v<float>;

// 2^x within 2 ulp; results that would be denormal are 0, and so is exp2_approx(-inf).
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2(x) to about 2^-22, and 1 / x within 1 ulp. Denormal arguments and results are replaced by 0.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Loads the global memory line that contains `at` into L2.
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

}  // namespace triad::cuda
