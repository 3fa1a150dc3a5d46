// Hopper's asynchronous matrix products (wgmma), issued by a warpgroup's four warps together:
//   d[64 x N] = a[64 x 16] b[16 x N], or d += a b, with bf16 operands and fp32 sums.
// a is in registers or in shared memory, b in shared memory (hopper/shared_memory.cuh).
//
// The sums d, and a in registers, are laid out as for mma.m16n8k16, with rows 16 w to 16 w + 15 in warp w: a lane holds
// row lane / 4 (e = 0, 1) and row lane / 4 + 8 (e = 2, 3) at the columns 8 j + 2 (lane % 4) + e % 2 of d[j][e].
//
// Call order: wgmma_fence(), if the thread has written registers that a product uses; the products; wgmma_commit();
// other work; wgmma_wait<n>(); pin(d); only then may d be read. Between the products and the wait no instruction may
// use d or a: otherwise ptxas serialises all of the kernel's products.
#pragma once
#include "kernels/hopper/shared_memory.cuh"
#include "kernels/hopper/warpgroup.cuh"

namespace triad::cuda {

// ---- tile descriptors ----

// How a product reads a tile [rows][64], with k the product's inner dimension:
//   k   along its rows, b[k = column][n = row]: the next 16 of k begin 32 bytes later;
//   mn  across its rows, b[k = row][n = column]: the next 16 of k begin 16 rows later.
enum class Major { k, mn };

// The lower half of a tile descriptor, in 16-byte units: the address, and the bytes from one panel to the next, which
// only products with Major::mn and more than 64 columns use. The upper half is the same for all tiles: 1024 bytes from
// eight rows to the next eight, 128-byte swizzle.
__device__ __forceinline__ uint32_t tile_descriptor(uint32_t address) { return 1u << 16 | address >> 4; }
__device__ __forceinline__ uint32_t tile_descriptor(uint32_t address, int panel_bytes) {
  return static_cast<uint32_t>(panel_bytes) << 12 | address >> 4;
}
inline constexpr uint32_t kDescriptorHigh = 1u << 30 | 1024 >> 4;

// ---- ordering ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending committed product groups are running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Prevents the compiler from moving uses of d across this point.
template <int kN>
__device__ __forceinline__ void pin(float (&d)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[j][e])::"memory");
}
// Lets the compiler treat d as initialised without setting it, for a product that overwrites d.
template <int kN>
__device__ __forceinline__ void leave_unset(float (&d)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "=f"(d[j][e]));
}

// ---- products ----

// Pieces of the instruction's text and operands: %0 .. are the sums; then come a, b, the descriptors' upper half,
// whether to add to d, and how a and b are read. Operands in PTX have numbers, not names, so each width spells them
// out.
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
// One product's text. The parameters after `text` are PTX operand numbers: a0 .. a3: a's registers; a or low, and high:
// the descriptor halves of a or b; add: whether the product is added to d; major_a, major_b: how the tile is read.
// `text` lists d's operands.
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
#define TRIAD_SHARED_128 TRIAD_WGMMA_SHARED(128, TRIAD_TEXT_64, 64, 65, 66, 67, 68, 69)
#define TRIAD_SHARED_192 TRIAD_WGMMA_SHARED(192, TRIAD_TEXT_96, 96, 97, 98, 99, 100, 101)
#define TRIAD_IN_REGISTERS(add) \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kDescriptorHigh), add, "n"(kB == Major::mn)
#define TRIAD_IN_SHARED(add) "r"(a), "r"(b), "n"(kDescriptorHigh), add, "n"(kA == Major::mn), "n"(kB == Major::mn)

// Issues one product. source: where a is (REGISTERS or SHARED); n, count: N and N / 8; sums, add: these operands'
// constraints.
#define TRIAD_ISSUE(source, n, count, sums, add) \
  asm volatile(TRIAD_##source##_##n : TRIAD_SUMS_##count(sums, 0) : TRIAD_IN_##source(add))

//   wgmma        d += a b, for N = 8 kJ columns; d = a b if the argument `add` is false
//   wgmma_begin  d = a b, with d as an output only
// a is in registers; b is a tile's descriptor, read as kB says. For wgmma, d is an input even if `add` is false, so
// that its registers stay the same from one loop iteration to the next: if d has no value yet, leave_unset(d) must
// precede it.
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

// The same with a in shared memory: a is a tile's descriptor, read as kA says.
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
  static_assert(kJ == 8 || kJ == 16 || kJ == 24, "this width is not instantiated");
  if constexpr (kJ == 8)
    TRIAD_ISSUE(SHARED, 64, 8, "+f", "r"(static_cast<int>(add)));
  else if constexpr (kJ == 16)
    TRIAD_ISSUE(SHARED, 128, 16, "+f", "r"(static_cast<int>(add)));
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

// One product with 72 columns: d += a b, and sums[64 x 8] += a ones[16 x 8], whose eight columns are equal
// (hopper/wgmma_ones.cuh). values: the address of tile b, read as Major::mn; ones: the address of the tile of ones.
__device__ __forceinline__ void wgmma_add_and_sum(float (&d)[8][4], float (&sums)[4], const uint32_t (&a)[4],
                                                  uint32_t values, uint32_t ones) {
  // The product reads the tile of ones as the panel that follows the values.
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
#undef TRIAD_SHARED_128
#undef TRIAD_SHARED_192
#undef TRIAD_IN_REGISTERS
#undef TRIAD_IN_SHARED
#undef TRIAD_ISSUE

// ---- operands in registers ----

// Rounds columns 16 k to 16 k + 15 in a product's sums to bf16, as the next product's operand a.
template <int kN>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[4], const float (&d)[kN][4], int k) {
  a[0] = pack_bf16(d[2 * k][0], d[2 * k][1]);
  a[1] = pack_bf16(d[2 * k][2], d[2 * k][3]);
  a[2] = pack_bf16(d[2 * k + 1][0], d[2 * k + 1][1]);
  a[3] = pack_bf16(d[2 * k + 1][2], d[2 * k + 1][3]);
}

// Loads 64 rows from global memory as operand a for kSteps products with 16 columns each. rows[0] and rows[1] are this
// lane's rows, numbers lane / 4 and lane / 4 + 8 among its warp's sixteen; nullptr means a zero row.
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
