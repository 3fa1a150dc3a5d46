// Tiles in shared memory in the layout that wgmma (hopper/wgmma.cuh) and the copy engine (hopper/tma.cuh) use.
//
// A tile is [rows][64] bf16 (for [rows][32] see swizzled_64b() below). A row has 128 bytes, eight 16-byte chunks, which
// are permuted by the row number's last three bits (the 128-byte swizzle), so that eight consecutive rows have the same
// chunk in different banks. A tile is aligned to 1024 bytes. A wider matrix has one such tile, called a panel, for
// every 64 columns.
#pragma once
#include <cstdint>

#include "kernels/common/ptx.cuh"

namespace triad::cuda {

inline constexpr int kPanel = 64, kPanelRowBytes = 128;  // panel columns; bytes per panel row

// The byte offset of row r's 16-byte chunk c in a tile.
__device__ __forceinline__ int swizzled(int r, int c) { return r * kPanelRowBytes + ((c ^ (r & 7)) << 4); }
// The same in a tile [rows][32], which is aligned to 512 bytes. Its rows have 64 bytes, four chunks, which are permuted
// by bits 1 and 2 of the row number (the 64-byte swizzle). The copy engine uses it for 32-column boxes.
__device__ __forceinline__ int swizzled_64b(int r, int c) {
  return r * (kPanelRowBytes / 2) + ((c ^ (r >> 1 & 3)) << 4);
}

// The start of the kernel's dynamic shared memory, aligned to 1024 bytes.
__device__ __forceinline__ unsigned char* aligned_shared() {
  extern __shared__ __align__(1024) unsigned char sm90_bytes[];
  return sm90_bytes;
}

// Makes this thread's stores and cp.async copies to shared memory visible to wgmma and TMA, once a thread barrier
// follows.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies 8 bytes from global to shared memory asynchronously (cp.async).
__device__ __forceinline__ void copy_async_8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// stmatrix: stores four 8x8 bf16 matrices to shared memory, the inverse of load_matrices() (common/ptx.cuh). Lanes 8i
// .. 8i + 7 pass matrix i's row addresses.
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&r)[4]) {
  store_matrices(shared_address(row), r[0], r[1], r[2], r[3]);
}
// The same, each matrix transposed.
__device__ __forceinline__ void store_matrices_transposed(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Loads or stores four floats. address: where they are in shared memory, as a shared_address() in bytes, a multiple
// of 16.
__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_shared(uint32_t address, const float4& x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

// Stores x as store_shared() does, but only if `condition` holds. The store is a predicated instruction, so a warp's
// threads do not branch.
__device__ __forceinline__ void store_shared_if(bool condition, uint32_t address, const float4& x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"r"(address),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(static_cast<int>(condition))
               : "memory");
}

}  // namespace triad::cuda
