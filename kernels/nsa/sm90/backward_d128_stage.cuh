// What the backward for heads of 128 (nsa/sm90/backward_d128.cu) works with: its arguments, the stages in shared
// memory, products of their tiles with 128 columns, additions in bulk, and the piece of work of a CTA.
#pragma once
#include "kernels/hopper/tma.cuh"
#include "kernels/nsa/sm90/backward.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

// From a token to the next and from a head to the next, in units in which offsets within a sequence fit 31 bits.
struct Steps {
  int row, head;
  template <class T>
  Steps(const View<T>& v, int unit) : row(static_cast<int>(v.row / unit)), head(static_cast<int>(v.head / unit)) {}
  __device__ __forceinline__ int at(int t, int h) const { return t * row + h * head; }
};

struct BwdD128Args {
  Attend<bf16> in;
  View<const bf16> dout;
  const RowStats* facts;
  View<const float> rounding_unit;
  View<float> dq;
  Steps q_steps, dout_steps, dq_steps;  // in units of 16 bytes
  GradView dk, dv;
  KeyRange range;
  KeyWorkList list;
  int part_tokens;  // contiguous rows: pieces are cut at multiples of it; 0: every block's rows in equal pieces
  int sequences_and_groups;
};

constexpr int kWidth = 128, kPanels = kWidth / kPanel, kStageRows = 64, kWarpRows = kStageRows / 4;
constexpr int kPanelBytes = 64 * kPanelRowBytes;  // of keys, of a stage's rows, and of ds: 64 rows each
constexpr int kCtaThreads = 4 * kWarpgroup, kKeyThreads = 3 * kWarpgroup;  // the latter bring the keys
constexpr int kMathRegisters = 208, kDqRegisters = 64, kLoadRegisters = 32;
constexpr int kRecent = 8;  // steps whose rows' places in dq are kept: more than may be under way

struct __align__(1024) RowStage {
  unsigned char q[kPanels][kPanelBytes], dout[kPanels][kPanelBytes];
};
struct __align__(1024) KeyPanels {
  unsigned char k[kPanels][kPanelBytes], v[kPanels][kPanelBytes];
};
template <bool kListed>
struct __align__(1024) Shared {
  static constexpr int kStages = kListed ? 4 : 3, kKeyTiles = kListed ? 1 : 2;
  KeyPanels keys[kKeyTiles];
  RowStage stages[kStages];
  unsigned char ds[2][kPanelBytes];                               // of each math warpgroup, [row][key]
  float dq[kStageRows][kWidth];                                   // on its way to global memory
  float shift[kStages][kStageRows], center[kStages][kStageRows];  // RowStats
  int2 range[kStages][kStageRows];                                // the keys that the row sees
  int2 seen_by_all[kStages];                                      // the keys that all rows of the stage see
  // Of the first of rows that follow each other in global memory: where its dq lies in its sequence, in units of 16
  // bytes, and the bytes of all of them; of other rows, and where there is no row: 0 bytes.
  int2 dq_run[kRecent][kStageRows];
  float rounding_unit[kRecent][kStageRows];
  uint64_t full[kStages], empty[kStages], ds_full[2], ds_empty[2], keys_full;
  int listed[kListed ? kWorkTokens / 2 : 1];
};

// By one lane, after all lanes of the warp are done.
__device__ __forceinline__ void warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
// Adds `bytes` of floats in shared memory to global memory, both at multiples of 16 bytes, without waiting.
__device__ __forceinline__ void add_bulk(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void add_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the sources of all this thread's bulk additions may be overwritten.
__device__ __forceinline__ void add_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Sums of 64 rows and 128 columns in registers; d[panel][j / 8 of the panel][.]. The 64 columns of a panel of the right
// operand, read across its rows, lie kPanelBytes from the next panel's.
constexpr uint32_t kAlong = 1u << 16, kAcross = static_cast<uint32_t>(kPanelBytes >> 4) << 16;
#define TRIAD_D4(d, j) "+f"((d)[j][0]), "+f"((d)[j][1]), "+f"((d)[j][2]), "+f"((d)[j][3])
#define TRIAD_D(d)                                                                                                \
  TRIAD_D4(d, 0), TRIAD_D4(d, 1), TRIAD_D4(d, 2), TRIAD_D4(d, 3), TRIAD_D4(d, 4), TRIAD_D4(d, 5), TRIAD_D4(d, 6), \
      TRIAD_D4(d, 7)
#define TRIAD_WGMMA                                                                                                  \
  "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "                                                           \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%" \
  "30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%" \
  "58,%59,%60,%61,%62,%63}, "
// d += a[64x16] b[16x128], a in registers.
__device__ __forceinline__ void wgmma_wide(float (&d)[kPanels][8][4], const uint32_t (&a)[4], uint32_t b) {
  asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%68, %69};\n" TRIAD_WGMMA "{%64,%65,%66,%67}, b, 1, 1, 1, 1;\n}"
               : TRIAD_D(d[0]), TRIAD_D(d[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kDescriptorHigh));
}
#undef TRIAD_WGMMA
// d[64x64] = (kAdd 0) or += (1) a[64x16] b[16x64], both in shared memory, a read along its rows, b across.
#define TRIAD_WGMMA(add)                                                                                             \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, %35};\nmov.b64 b, {%33, %35};\n"  \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, a, b, p, 1, 1, 0, 1;\n}"                    \
      : TRIAD_D(d)                                                                                                   \
      : "r"(a), "r"(b), "n"(add), "n"(kDescriptorHigh))
template <int kAdd>
__device__ __forceinline__ void wgmma_shared_across(float (&d)[8][4], uint32_t a, uint32_t b) {
  TRIAD_WGMMA(kAdd);
}
#undef TRIAD_WGMMA
#undef TRIAD_D
#undef TRIAD_D4
// A value that all lanes have alike, told to the compiler.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __reduce_or_sync(kFullWarp, x); }
// Four 8x8 matrices to shared memory, transposed; lanes 8i .. 8i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void store_matrices_transposed(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// The piece of this CTA. Contiguous rows without a window's limit: all blocks' pieces of one run of tokens follow each
// other, for L2 too; the last tokens, which see most, come first.
__device__ __forceinline__ KeyWork find_piece(const BwdD128Args& a, int i, int bg) {
  if (a.part_tokens == 0) return find_work(a.list, a.range, a.in.tokens, i, bg, a.sequences_and_groups);
  const int parts = a.list.pieces / a.list.blocks, part = parts - 1 - i / a.list.blocks, block = i % a.list.blocks;
  const int key0 = block * a.list.block_keys, key1 = min(key0 + a.list.block_keys, a.range.keys) - 1;
  const int first = max(a.range.first_row(key0), part * a.part_tokens);
  const int end = min(a.range.end_row(key1, a.in.tokens), (part + 1) * a.part_tokens);
  return {block, first, first < end ? end - first : -1, parts > 1 ? (bg * a.list.blocks + block) * parts + part : -1};
}

}  // namespace
}  // namespace triad::cuda
