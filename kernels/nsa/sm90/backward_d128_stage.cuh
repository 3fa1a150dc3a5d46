// The backward for heads of 128 (nsa/sm90/backward_d128.cu has the design): its arguments, shared memory, and a CTA's
// piece of work.
#pragma once
#include "kernels/hopper/tma.cuh"
#include "kernels/nsa/sm90/backward.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

// The strides of a token and of a head, in units in which offsets within a sequence fit 31 bits.
struct Steps {
  int row, head;
  template <class T>
  Steps(const View<T>& v, int unit) : row(static_cast<int>(v.row / unit)), head(static_cast<int>(v.head / unit)) {}
  __device__ __forceinline__ int at(int t, int h) const { return t * row + h * head; }
};

struct BwdD128Args {
  Attend<bf16> in;
  View<const bf16> dout;
  const RowStats* row_stats;
  View<const float> rounding_unit;
  View<float> dq;
  Steps q_steps, dout_steps, dq_steps;  // in units of 16 bytes
  GradView dk, dv;
  KeyRange range;
  KeyWorkList list;
  int part_tokens;  // contiguous rows: pieces are cut at multiples of it; 0: every block's rows form equal pieces
  int sequences_and_groups;
};

constexpr int kWidth = 128, kPanels = kWidth / kPanel, kStageRows = 64, kWarpRows = kStageRows / 4;
constexpr int kPanelBytes = 64 * kPanelRowBytes;  // of keys, of a stage's rows, and of ds: 64 rows each
constexpr int kCtaThreads = 4 * kWarpgroup, kKeyThreads = 3 * kWarpgroup;  // the latter load the keys
constexpr int kMmaRegisters = 208, kDqRegisters = 64, kProducerRegisters = 32;
constexpr int kRecent = 8;  // steps whose offsets in dq are kept: more than can be in flight

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
  unsigned char ds[2][kPanelBytes];                            // of each MMA warpgroup, [row][key]
  float dq[kStageRows][kWidth];                                // on its way to global memory
  float lse[kStages][kStageRows], dpsum[kStages][kStageRows];  // RowStats
  int2 range[kStages][kStageRows];                             // the keys that the row sees
  int2 seen_by_all[kStages];                                   // the keys that all rows of the stage see
  // Rows whose dq are neighbours in global memory form a run. First row of a run: the offset of its dq in the sequence,
  // in units of 16 bytes, and the bytes of the run. Other rows: 0 bytes.
  int2 dq_run[kRecent][kStageRows];
  float rounding_unit[kRecent][kStageRows];
  Barrier full[kStages], empty[kStages], ds_full[2], ds_empty[2], keys_full;
  int listed[kListed ? kWorkTokens / 2 : 1];
};

// The leading offset of a tile's descriptor (hopper/wgmma.cuh): tiles read along their rows, and across them in panels.
constexpr uint32_t kReadAlong = 1u << 16, kReadAcross = static_cast<uint32_t>(kPanelBytes >> 4) << 16;

// The piece of CTA i of (b, g). Contiguous rows without a window: the pieces of one run of tokens are consecutive over
// all blocks, for L2; the last tokens, which see most keys, start first.
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
