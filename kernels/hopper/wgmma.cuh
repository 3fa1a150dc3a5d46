// Hopper's warpgroup matrix products (wgmma): d[64 x N] (+)= a[64 x 16] b[16 x N], bf16 with fp32 sums, asynchronous,
// by the four warps of a warpgroup together. a is in registers or shared memory, b in shared memory
// (hopper/shared_memory.cuh).
//
// Sums and a register operand are laid out as for mma.m16n8k16, warp w with rows 16 w to 16 w + 15: a lane holds row
// lane / 4 (e = 0, 1) and row lane / 4 + 8 (e = 2, 3) at the columns 8 j + 2 (lane % 4) + e % 2 of d[j][e].
//
// The order of calls: wgmma_fence() before the first product that uses registers written by the thread; products;
// wgmma_commit(); other work; wgmma_wait<n>(); pin(d) before d is read. Until then no instruction may use d or a: ptxas
// otherwise serialises all products of the kernel.
#pragma once
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/hopper/warpgroup.cuh"

namespace triad::cuda {

// ---- descriptors of tiles ----

// How a product reads a tile [rows][64]:
//   k   along its rows, b[k = column][n = row]: the next 16 of k are 32 bytes further;
//   mn  across its rows, b[k = row][n = column]: the next 16 of k are 16 rows further.
enum class Major { k, mn };

// The lower half of a tile's descriptor, in units of 16 bytes: address, and a leading offset that only Major::mn with
// more than 64 columns uses, the bytes from a panel to the next. The upper half is the same for all tiles: 1024 bytes
// from eight rows to the next eight, 128-byte swizzle.
__device__ __forceinline__ uint32_t tile_descriptor(uint32_t address) { return 1u << 16 | address >> 4; }
__device__ __forceinline__ uint32_t tile_descriptor(uint32_t address, int panel_bytes) {
  return static_cast<uint32_t>(panel_bytes) << 12 | address >> 4;
}
inline constexpr uint32_t kDescriptorHigh = 1u << 30 | 1024 >> 4;

// ---- ordering ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the committed groups are running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler does not move uses of d across this point.
template <int kN>
__device__ __forceinline__ void pin(float (&d)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[j][e])::"memory");
}
// Defines d without setting it, for a product that overwrites it.
template <int kN>
__device__ __forceinline__ void leave_unset(float (&d)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "=f"(d[j][e]));
}

// ---- products ----

// The instruction's text and operands: %0 .. are the sums, then a, b, the upper descriptor half, whether to add, and
// how a and b are read. PTX has no names for operands, so each width spells its numbers.
#define TRIAD_SUMS_1(how, j) how(d[j][0]), how(d[j][1]), how(d[j][2]), how(d[j][3])
#define TRIAD_SUMS_2(how, j) TRIAD_SUMS_1(how, j), TRIAD_SUMS_1(how, j + 1)
#define TRIAD_SUMS_4(how, j) TRIAD_SUMS_2(how, j), TRIAD_SUMS_2(how, j + 2)
#define TRIAD_SUMS_8(how, j) TRIAD_SUMS_4(how, j), TRIAD_SUMS_4(how, j + 4)
#define TRIAD_SUMS_16(how, j) TRIAD_SUMS_8(how, j), TRIAD_SUMS_8(how, j + 8)
#define TRIAD_SUMS_24(how, j) TRIAD_SUMS_16(how, j), TRIAD_SUMS_8(how, j + 16)
#define TRIAD_TEXT_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TRIAD_TEXT_16 TRIAD_TEXT_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TRIAD_TEXT_32 TRIAD_TEXT_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TRIAD_TEXT_36 TRIAD_TEXT_32 ",%32,%33,%34,%35"
#define TRIAD_TEXT_64                                                                                 \
  TRIAD_TEXT_36                                                                                       \
  ",%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define TRIAD_TEXT_96                                                                                 \
  TRIAD_TEXT_64                                                                                       \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87," \
  "%88,%89,%90,%91,%92,%93,%94,%95"
// a in registers %a0 .. %a3, b's descriptor {%b, %high}; add, and b's major order.
#define TRIAD_WGMMA_REGISTERS(n, text, a0, a1, a2, a3, low, high, add, major_b)                            \
  "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" #add ", 0;\nmov.b64 b, {%" #low ", %" #high           \
  "};\n"                                                                                                   \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" text "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 \
  "}, "                                                                                                    \
  "b, p, 1, 1, %" #major_b ";\n}"
#define TRIAD_WGMMA_SHARED(n, text, a, low, high, add, major_a, major_b)                                          \
  "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" #add ", 0;\nmov.b64 a, {%" #a ", %" #high                 \
  "};\n"                                                                                                          \
  "mov.b64 b, {%" #low ", %" #high                                                                                \
  "};\n"                                                                                                          \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" text "}, a, b, p, 1, 1, %" #major_a ", %" #major_b \
  ";\n}"

#define TRIAD_REGISTERS_16 TRIAD_WGMMA_REGISTERS(16, TRIAD_TEXT_8, 8, 9, 10, 11, 12, 13, 14, 15)
#define TRIAD_REGISTERS_32 TRIAD_WGMMA_REGISTERS(32, TRIAD_TEXT_16, 16, 17, 18, 19, 20, 21, 22, 23)
#define TRIAD_REGISTERS_64 TRIAD_WGMMA_REGISTERS(64, TRIAD_TEXT_32, 32, 33, 34, 35, 36, 37, 38, 39)
#define TRIAD_REGISTERS_72 TRIAD_WGMMA_REGISTERS(72, TRIAD_TEXT_36, 36, 37, 38, 39, 40, 41, 42, 43)
#define TRIAD_REGISTERS_128 TRIAD_WGMMA_REGISTERS(128, TRIAD_TEXT_64, 64, 65, 66, 67, 68, 69, 70, 71)
#define TRIAD_SHARED_32 TRIAD_WGMMA_SHARED(32, TRIAD_TEXT_16, 16, 17, 18, 19, 20, 21)
#define TRIAD_SHARED_64 TRIAD_WGMMA_SHARED(64, TRIAD_TEXT_32, 32, 33, 34, 35, 36, 37)
#define TRIAD_SHARED_192 TRIAD_WGMMA_SHARED(192, TRIAD_TEXT_96, 96, 97, 98, 99, 100, 101)
#define TRIAD_IN_REGISTERS(add) \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kDescriptorHigh), add, "n"(kB == Major::mn)
#define TRIAD_IN_SHARED(add) "r"(a), "r"(b), "n"(kDescriptorHigh), add, "n"(kA == Major::mn), "n"(kB == Major::mn)

// One statement: where a is (REGISTERS, SHARED), N and N / 8, and the constraints of the sums and of `add`.
#define TRIAD_ISSUE(source, n, count, sums, add) \
  asm volatile(TRIAD_##source##_##n : TRIAD_SUMS_##count(sums, 0) : TRIAD_IN_##source(add))

// wgmma        d += a b, for N = 8 kJ columns; d = a b where the argument `add` is false
// wgmma_begin  d = a b, with d as an output only
// a is in registers, b the descriptor of a tile that is read as kB says. To wgmma, d is an input even where `add` is
// false, so its registers stay the same across the end of a loop's body: leave_unset(d) precedes it if d has no value.
template <Major kB, int kJ>
__device__ __forceinline__ void wgmma(float (&d)[kJ][4], const uint32_t (&a)[4], uint32_t b) {
  static_assert(kJ == 4 || kJ == 8 || kJ == 16, "this width is not instantiated");
  if constexpr (kJ == 4)
    TRIAD_ISSUE(REGISTERS, 32, 4, "+f", "n"(1));
  else if constexpr (kJ == 8)
    TRIAD_ISSUE(REGISTERS, 64, 8, "+f", "n"(1));
  else
    TRIAD_ISSUE(REGISTERS, 128, 16, "+f", "n"(1));
}
template <Major kB, int kJ>
__device__ __forceinline__ void wgmma(float (&d)[kJ][4], const uint32_t (&a)[4], uint32_t b, bool add) {
  static_assert(kJ == 2 || kJ == 4 || kJ == 8, "this width is not instantiated");
  if constexpr (kJ == 2)
    TRIAD_ISSUE(REGISTERS, 16, 2, "+f", "r"(static_cast<int>(add)));
  else if constexpr (kJ == 4)
    TRIAD_ISSUE(REGISTERS, 32, 4, "+f", "r"(static_cast<int>(add)));
  else
    TRIAD_ISSUE(REGISTERS, 64, 8, "+f", "r"(static_cast<int>(add)));
}
template <Major kB, int kJ>
__device__ __forceinline__ void wgmma_begin(float (&d)[kJ][4], const uint32_t (&a)[4], uint32_t b) {
  static_assert(kJ == 4 || kJ == 8, "this width is not instantiated");
  if constexpr (kJ == 4)
    TRIAD_ISSUE(REGISTERS, 32, 4, "=f", "n"(0));
  else
    TRIAD_ISSUE(REGISTERS, 64, 8, "=f", "n"(0));
}

// The same with a in shared memory too, the descriptor of a tile that is read as kA says.
template <Major kA, Major kB, int kJ>
__device__ __forceinline__ void wgmma(float (&d)[kJ][4], uint32_t a, uint32_t b) {
  static_assert(kJ == 4 || kJ == 8, "this width is not instantiated");
  if constexpr (kJ == 4)
    TRIAD_ISSUE(SHARED, 32, 4, "+f", "n"(1));
  else
    TRIAD_ISSUE(SHARED, 64, 8, "+f", "n"(1));
}
template <Major kA, Major kB, int kJ>
__device__ __forceinline__ void wgmma(float (&d)[kJ][4], uint32_t a, uint32_t b, bool add) {
  static_assert(kJ == 8 || kJ == 24, "this width is not instantiated");
  if constexpr (kJ == 8)
    TRIAD_ISSUE(SHARED, 64, 8, "+f", "r"(static_cast<int>(add)));
  else
    TRIAD_ISSUE(SHARED, 192, 24, "+f", "r"(static_cast<int>(add)));
}
template <Major kA, Major kB, int kJ>
__device__ __forceinline__ void wgmma_begin(float (&d)[kJ][4], uint32_t a, uint32_t b) {
  static_assert(kJ == 4 || kJ == 8, "this width is not instantiated");
  if constexpr (kJ == 4)
    TRIAD_ISSUE(SHARED, 32, 4, "=f", "n"(0));
  else
    TRIAD_ISSUE(SHARED, 64, 8, "=f", "n"(0));
}

// d += a b, and sums[64 x 8] += a ones[16 x 8], eight columns alike (hopper/wgmma_ones.cuh): one product of 72 columns.
// b is a tile of values that is read across its rows (Major::mn), `ones` the tile of ones; both are addresses.
__device__ __forceinline__ void wgmma_add_and_sum(float (&d)[8][4], float (&sums)[4], const uint32_t (&a)[4],
                                                  uint32_t values, uint32_t ones) {
  // To the product, the ones are the panel that follows the values.
  const uint32_t b = tile_descriptor(values, static_cast<int>(ones - values));
  constexpr Major kB = Major::mn;
  asm volatile(TRIAD_REGISTERS_72
               : TRIAD_SUMS_8("+f", 0), "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : TRIAD_IN_REGISTERS("n"(1)));
}
#undef TRIAD_SUMS_1
#undef TRIAD_SUMS_2
#undef TRIAD_SUMS_4
#undef TRIAD_SUMS_8
#undef TRIAD_SUMS_16
#undef TRIAD_SUMS_24
#undef TRIAD_TEXT_8
#undef TRIAD_TEXT_16
#undef TRIAD_TEXT_32
#undef TRIAD_TEXT_36
#undef TRIAD_TEXT_64
#undef TRIAD_TEXT_96
#undef TRIAD_WGMMA_REGISTERS
#undef TRIAD_WGMMA_SHARED
#undef TRIAD_REGISTERS_16
#undef TRIAD_REGISTERS_32
#undef TRIAD_REGISTERS_64
#undef TRIAD_REGISTERS_72
#undef TRIAD_REGISTERS_128
#undef TRIAD_SHARED_32
#undef TRIAD_SHARED_64
#undef TRIAD_SHARED_192
#undef TRIAD_IN_REGISTERS
#undef TRIAD_IN_SHARED
#undef TRIAD_ISSUE

// ---- operands in registers ----

// Columns 16 k to 16 k + 15 of a product, rounded to bf16, as the left operand of the next product.
template <int kN>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[4], const float (&d)[kN][4], int k) {
  a[0] = pack_bf16(d[2 * k][0], d[2 * k][1]);
  a[1] = pack_bf16(d[2 * k][2], d[2 * k][3]);
  a[2] = pack_bf16(d[2 * k + 1][0], d[2 * k + 1][1]);
  a[3] = pack_bf16(d[2 * k + 1][2], d[2 * k + 1][3]);
}

// 64 rows of global memory as a left operand of kSteps steps of 16 columns: rows[0] and rows[1] are this lane's rows
// (lane / 4 and 8 more of its warp's sixteen), nullptr for a row of zeros.
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

}  // namespace triad::cuda
