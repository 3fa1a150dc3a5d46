// Hopper's warpgroup products (wgmma) as the attention kernels use them: A (64 rows) in registers, B in shared memory.
// A tile in shared memory is [rows][64] bf16, one row 128 bytes, its eight 16-byte chunks permuted by the row's last
// three bits (the 128-byte swizzle): conflict-free to write by rows, and readable both ways:
//   along the row     as B[k = column][n = row]   (K-major: scores, one k16 step is 32 bytes further)
//   across the rows   as B[k = row][n = column]   (N-major: the sums over rows, one k16 step is 16 rows further)
// Tiles start at a multiple of 1024 bytes. Wider heads have one such panel for every 64 columns.
#pragma once
#include <cstdint>

#include "kernels/common/ptx.cuh"

namespace triad::cuda {

inline constexpr int kPanel = 64, kPanelRowBytes = 128, kWarpgroup = 128;

// Where chunk c of row r lies in a tile.
__device__ __forceinline__ int swizzled(int r, int c) { return r * kPanelRowBytes + ((c ^ (r & 7)) << 4); }

// The lower half of a tile's descriptor, in units of 16 bytes: address, and the unused leading offset. The upper half
// is the same for all: 1024 bytes from eight rows to the next eight, 128-byte swizzle.
__device__ __forceinline__ uint32_t tile_descriptor(uint32_t address) { return 1u << 16 | address >> 4; }
inline constexpr uint32_t kDescriptorHigh = 1u << 30 | 1024 >> 4;

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending of the committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// What ordinary stores and cp.async of this thread wrote to shared memory becomes visible to wgmma (after a barrier).
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The compiler must not move uses of a running product's registers across this point.
template <int kN>
__device__ __forceinline__ void pin(float (&d)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[j][e])::"memory");
}

#define TRIAD_D4(how, j) how(d[j][0]), how(d[j][1]), how(d[j][2]), how(d[j][3])
// d[64 x N] = a[64 x 16] b[16 x N] (first) or += (add), for N = 32 and 64; kAcross: b is read across the rows of its
// tile. d and a lie in the registers as for mma.m16n8k16, warp w having rows 16w .. 16w + 15.
template <int kAcross>
__device__ __forceinline__ void wgmma_first(float (&d)[4][4], const uint32_t (&a)[4], uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, %23};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, b, p, 1, 1, %22;\n}"
      : TRIAD_D4("=f", 0), TRIAD_D4("=f", 1), TRIAD_D4("=f", 2), TRIAD_D4("=f", 3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(0), "n"(kAcross), "n"(kDescriptorHigh));
}
template <int kAcross>
__device__ __forceinline__ void wgmma_add(float (&d)[4][4], const uint32_t (&a)[4], uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, %23};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, b, p, 1, 1, %22;\n}"
      : TRIAD_D4("+f", 0), TRIAD_D4("+f", 1), TRIAD_D4("+f", 2), TRIAD_D4("+f", 3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(1), "n"(kAcross), "n"(kDescriptorHigh));
}
template <int kAcross>
__device__ __forceinline__ void wgmma_first(float (&d)[8][4], const uint32_t (&a)[4], uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, %39};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%"
      "30,%31}, "
      "{%32,%33,%34,%35}, b, p, 1, 1, %38;\n}"
      : TRIAD_D4("=f", 0), TRIAD_D4("=f", 1), TRIAD_D4("=f", 2), TRIAD_D4("=f", 3), TRIAD_D4("=f", 4),
        TRIAD_D4("=f", 5), TRIAD_D4("=f", 6), TRIAD_D4("=f", 7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(0), "n"(kAcross), "n"(kDescriptorHigh));
}
template <int kAcross>
__device__ __forceinline__ void wgmma_add(float (&d)[8][4], const uint32_t (&a)[4], uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, %39};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%"
      "30,%31}, "
      "{%32,%33,%34,%35}, b, p, 1, 1, %38;\n}"
      : TRIAD_D4("+f", 0), TRIAD_D4("+f", 1), TRIAD_D4("+f", 2), TRIAD_D4("+f", 3), TRIAD_D4("+f", 4),
        TRIAD_D4("+f", 5), TRIAD_D4("+f", 6), TRIAD_D4("+f", 7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(1), "n"(kAcross), "n"(kDescriptorHigh));
}
// The same with a in shared memory too, both read along their rows.
__device__ __forceinline__ void wgmma_first(float (&d)[4][4], uint32_t a, uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %18, 0;\nmov.b64 a, {%16, %19};\nmov.b64 b, {%17, %19};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "a, b, p, 1, 1, 0, 0;\n}"
      : TRIAD_D4("=f", 0), TRIAD_D4("=f", 1), TRIAD_D4("=f", 2), TRIAD_D4("=f", 3)
      : "r"(a), "r"(b), "n"(0), "n"(kDescriptorHigh));
}
__device__ __forceinline__ void wgmma_add(float (&d)[4][4], uint32_t a, uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %18, 0;\nmov.b64 a, {%16, %19};\nmov.b64 b, {%17, %19};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "a, b, p, 1, 1, 0, 0;\n}"
      : TRIAD_D4("+f", 0), TRIAD_D4("+f", 1), TRIAD_D4("+f", 2), TRIAD_D4("+f", 3)
      : "r"(a), "r"(b), "n"(1), "n"(kDescriptorHigh));
}
#undef TRIAD_D4

// Columns 16k .. 16k + 15 of a product, rounded, as the left operand of the next.
template <int kN>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[4], const float (&d)[kN][4], int k) {
  a[0] = pack_bf16(d[2 * k][0], d[2 * k][1]);
  a[1] = pack_bf16(d[2 * k][2], d[2 * k][3]);
  a[2] = pack_bf16(d[2 * k + 1][0], d[2 * k + 1][1]);
  a[3] = pack_bf16(d[2 * k + 1][2], d[2 * k + 1][3]);
}

// Two rows of global memory as a left operand: rows[0] and rows[1] are this lane's (lane/4 and 8 more of its warp's
// sixteen), nullptr for zeros; kSteps steps of 16 columns.
template <int kSteps>
__device__ __forceinline__ void load_operand(uint32_t (&a)[kSteps][4], const __nv_bfloat16* const (&rows)[2]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat16* row = rows[i % 2];
      const int column = 16 * k + 8 * (i / 2) + threadIdx.x % 4 * 2;
      a[k][i] = row == nullptr ? 0u : __ldg(reinterpret_cast<const uint32_t*>(row + column));
    }
}

__device__ __forceinline__ void copy_async_8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// *to += (x, y) where the memory is, without waiting for the sum. One thread adds to each element: the bits repeat.
__device__ __forceinline__ void add_pair(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

// The launch's shared memory from the first multiple of 1024 bytes on.
__device__ __forceinline__ unsigned char* aligned_shared() {
  extern __shared__ __align__(1024) unsigned char sm90_bytes[];
  return sm90_bytes;
}

// ---- F2: both operands in shared memory, 64 columns; sums that begin or go on as a register says; mbarriers ----

#define TRIAD_D4(how, j) how(d[j][0]), how(d[j][1]), how(d[j][2]), how(d[j][3])
// d[64 x 64] = a b (add 0) or += a b (add 1), a and b in shared memory and read along their rows.
__device__ __forceinline__ void wgmma_shared(float (&d)[8][4], uint32_t a, uint32_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, %35};\nmov.b64 b, {%33, %35};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%"
      "30,%31}, a, b, p, 1, 1, 0, 0;\n}"
      : TRIAD_D4("+f", 0), TRIAD_D4("+f", 1), TRIAD_D4("+f", 2), TRIAD_D4("+f", 3), TRIAD_D4("+f", 4),
        TRIAD_D4("+f", 5), TRIAD_D4("+f", 6), TRIAD_D4("+f", 7)
      : "r"(a), "r"(b), "r"(add), "n"(kDescriptorHigh));
}
// The same with a in registers and b read across its rows.
__device__ __forceinline__ void wgmma_across(float (&d)[8][4], const uint32_t (&a)[4], uint32_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, %38};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%"
      "30,%31}, {%32,%33,%34,%35}, b, p, 1, 1, 1;\n}"
      : TRIAD_D4("+f", 0), TRIAD_D4("+f", 1), TRIAD_D4("+f", 2), TRIAD_D4("+f", 3), TRIAD_D4("+f", 4),
        TRIAD_D4("+f", 5), TRIAD_D4("+f", 6), TRIAD_D4("+f", 7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kDescriptorHigh));
}
#undef TRIAD_D4
// Registers that a product is about to overwrite: any value will do, and none is moved there.
template <int kN>
__device__ __forceinline__ void leave_unset(float (&d)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "=f"(d[j][e]));
}

// mbarriers in shared memory, by address. A wait for `parity` ends when the phase of that parity has.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Arrives when all cp.async that this thread has begun are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra "
      "WAIT;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Rows of four 8x8 matrices to shared memory: the inverse of load_matrices.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// ---- F1: both operands in shared memory, 64 columns ----

// d[64 x 64] = a[64 x 16] b[16 x 64], or += with kAdd; a and b read along their rows.
#define TRIAD_D4(how, j) how(d[j][0]), how(d[j][1]), how(d[j][2]), how(d[j][3])
#define TRIAD_WGMMA(how, add)                                                                                        \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, %35};\nmov.b64 b, {%33, %35};\n"  \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, a, b, p, 1, 1, 0, 0;\n}"                    \
      : TRIAD_D4(how, 0), TRIAD_D4(how, 1), TRIAD_D4(how, 2), TRIAD_D4(how, 3), TRIAD_D4(how, 4), TRIAD_D4(how, 5),  \
        TRIAD_D4(how, 6), TRIAD_D4(how, 7)                                                                           \
      : "r"(a), "r"(b), "n"(add), "n"(kDescriptorHigh))
template <bool kAdd>
__device__ __forceinline__ void wgmma_shared(float (&d)[8][4], uint32_t a, uint32_t b) {
  if constexpr (kAdd)
    TRIAD_WGMMA("+f", 1);
  else
    TRIAD_WGMMA("=f", 0);
}
#undef TRIAD_WGMMA
#undef TRIAD_D4

// ---- B2: for barriers in shared memory (hopper/tma.cuh) and warpgroups apart: cp.async that arrives, registers handed
// over, products of two tiles across their rows ----

// Arrives at the barrier when all cp.async that this thread has begun are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void sync_threads(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// d[64 x 64] = (kAdd 0) or += (1) a[64 x 16] b[16 x 64], both in shared memory and read across their rows.
#define TRIAD_D4(how, j) how(d[j][0]), how(d[j][1]), how(d[j][2]), how(d[j][3])
#define TRIAD_WGMMA(how, add)                                                                                        \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, %35};\nmov.b64 b, {%33, %35};\n"  \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, a, b, p, 1, 1, 1, 1;\n}"                    \
      : TRIAD_D4(how, 0), TRIAD_D4(how, 1), TRIAD_D4(how, 2), TRIAD_D4(how, 3), TRIAD_D4(how, 4), TRIAD_D4(how, 5),  \
        TRIAD_D4(how, 6), TRIAD_D4(how, 7)                                                                           \
      : "r"(a), "r"(b), "n"(add), "n"(kDescriptorHigh))
template <int kAdd>
__device__ __forceinline__ void wgmma_across(float (&d)[8][4], uint32_t a, uint32_t b) {
  if constexpr (kAdd == 0)
    TRIAD_WGMMA("=f", 0);
  else
    TRIAD_WGMMA("+f", 1);
}
#undef TRIAD_WGMMA
#undef TRIAD_D4

// Four 8x8 matrices to shared memory; lanes 8i .. 8i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// As add_pair, four columns.
__device__ __forceinline__ void add_four(float* to, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

// ---- SEL: 16, 32 or 64 columns whose registers stay the same from one sum to the next ----

// d[64 x N] = a[64 x 16] b[16 x N], or += with add; b is read along its rows. Sums that are on their way over the end
// of a loop's body need this form: where d is an output alone, the compiler finds it other registers (and spills).
#define TRIAD_D4(how, j) how(d[j][0]), how(d[j][1]), how(d[j][2]), how(d[j][3])
__device__ __forceinline__ void wgmma_rows(float (&d)[2][4], const uint32_t (&a)[4], uint32_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %13, 0;\nmov.b64 b, {%12, %14};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7}, "
      "{%8,%9,%10,%11}, b, p, 1, 1, 0;\n}"
      : TRIAD_D4("+f", 0), TRIAD_D4("+f", 1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(add)), "n"(kDescriptorHigh));
}
__device__ __forceinline__ void wgmma_rows(float (&d)[4][4], const uint32_t (&a)[4], uint32_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, %22};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "{%16,%17,%18,%19}, b, p, 1, 1, 0;\n}"
      : TRIAD_D4("+f", 0), TRIAD_D4("+f", 1), TRIAD_D4("+f", 2), TRIAD_D4("+f", 3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(add)), "n"(kDescriptorHigh));
}
__device__ __forceinline__ void wgmma_rows(float (&d)[8][4], const uint32_t (&a)[4], uint32_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, %38};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, b, p, 1, 1, 0;\n}"
      : TRIAD_D4("+f", 0), TRIAD_D4("+f", 1), TRIAD_D4("+f", 2), TRIAD_D4("+f", 3), TRIAD_D4("+f", 4),
        TRIAD_D4("+f", 5), TRIAD_D4("+f", 6), TRIAD_D4("+f", 7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(add)), "n"(kDescriptorHigh));
}
#undef TRIAD_D4

// ---- NM: 128 columns ----

// Of a tile with columns beyond its first panel, read across its rows: panel_bytes from panel to panel.
__device__ __forceinline__ uint32_t tile_descriptor(uint32_t address, int panel_bytes) {
  return static_cast<uint32_t>(panel_bytes) << 12 | address >> 4;
}

#define TRIAD_D4(how, j) how(d[j][0]), how(d[j][1]), how(d[j][2]), how(d[j][3])
#define TRIAD_D64(how)                                                                                              \
  TRIAD_D4(how, 0), TRIAD_D4(how, 1), TRIAD_D4(how, 2), TRIAD_D4(how, 3), TRIAD_D4(how, 4), TRIAD_D4(how, 5),       \
      TRIAD_D4(how, 6), TRIAD_D4(how, 7), TRIAD_D4(how, 8), TRIAD_D4(how, 9), TRIAD_D4(how, 10), TRIAD_D4(how, 11), \
      TRIAD_D4(how, 12), TRIAD_D4(how, 13), TRIAD_D4(how, 14), TRIAD_D4(how, 15)
// d[64 x 128] += a[64 x 16] b[16 x 128], a in registers, b in shared memory and read across its rows.
__device__ __forceinline__ void wgmma_add_across(float (&d)[16][4], const uint32_t (&a)[4], uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %69, 0;\nmov.b64 b, {%68, %70};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%"
      "30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%"
      "58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, b, p, 1, 1, 1;\n}"
      : TRIAD_D64("+f")
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(1), "n"(kDescriptorHigh));
}
__device__ __forceinline__ void wgmma_add_across(float (&d)[8][4], const uint32_t (&a)[4], uint32_t b) {
  wgmma_add<1>(d, a, b);
}
#undef TRIAD_D64
#undef TRIAD_D4

}  // namespace triad::cuda
