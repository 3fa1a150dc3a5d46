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

// The upper half of a descriptor's lower word: how a product reads a tile.
constexpr uint32_t kAlong = 1u << 16, kAcross = static_cast<uint32_t>(kPanelBytes >> 4) << 16;
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
