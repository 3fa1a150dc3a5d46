// The backward for head width 128 (nsa/sm90/backward_d128.cu has the design): its arguments, shared memory, and a CTA's
// piece of work.
#pragma once
#include "kernels/hopper/tma.cuh"
#include "kernels/nsa/sm90/backward.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

// Token and head strides, in units (16 bytes) in which the offsets within a sequence fit into 31 bits.
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
  Steps q_steps, dout_steps, dq_steps;  // strides in units of 16 bytes
  GradView dk, dv;
  KeyRange range;
  KeyWorkList list;
  int part_tokens;  // contiguous rows are cut into pieces every so many tokens; 0: each block's rows form equal pieces
  int sequences_and_groups;
};

constexpr int kWidth = 128, kPanels = kWidth / kPanel, kStageRows = 64, kWarpRows = kStageRows / 4;
constexpr int kPanelBytes = 64 * kPanelRowBytes;  // a panel for 64 keys, or for a stage's 64 rows
constexpr int kCtaThreads = 4 * kWarpgroup, kKeyThreads = 3 * kWarpgroup;  // kKeyThreads load the keys
constexpr int kMmaRegisters = 208, kDqRegisters = 64, kProducerRegisters = 32;
constexpr int kRecent = 8;  // the dq offsets for this many steps are kept: more than can be in flight

struct __align__(1024) RowStage {
  unsigned char q[kPanels][kPanelBytes], dout[kPanels][kPanelBytes];
};
struct __align__(1024) KeyPanels {
  unsigned char k[kPanels][kPanelBytes], v[kPanels][kPanelBytes];
};
template <class Rows>
struct __align__(1024) Shared {
  static constexpr int kStages = Rows::kAlternates ? 4 : 3, kKeyTiles = Rows::kAlternates ? 1 : 2;
  KeyPanels keys[kKeyTiles];
  RowStage stages[kStages];
  unsigned char ds[2][kPanelBytes];                            // each MMA warpgroup's ds, [row][key]
  float dq[kStageRows][kWidth];                                // the stage's dq, before it is added to global memory
  float lse[kStages][kStageRows], dpsum[kStages][kStageRows];  // each row's statistics (RowStats)
  // The first key that the row sees, and where its keys end.
  int2 range[kStages][kStageRows];
  int2 seen_by_all[kStages];  // the same for the keys that all rows in the stage see
  // Neighbouring rows whose dq are neighbours in global memory too form a strip, which one bulk addition adds. For the
  // strip's first row: the offset of its dq within the sequence, in units of 16 bytes, and the strip's length in bytes.
  // For the other rows the length is 0.
  int2 dq_strip[kRecent][kStageRows];
  float rounding_unit[kRecent][kStageRows];
  Barrier full[kStages], empty[kStages], ds_full[2], ds_empty[2], keys_full;
  int listed[Rows::kListed ? kWorkTokens / 2 : 1];
};

// The bits in a wgmma descriptor (hopper/wgmma.cuh) that hold the leading offset, for tiles read along their rows, and
// for tiles read across them, in panels.
constexpr uint32_t kReadAlong = 1u << 16, kReadAcross = static_cast<uint32_t>(kPanelBytes >> 4) << 16;

// CTA number i's work in a sequence and group. For contiguous rows without a window, the CTAs for one token range have
// consecutive numbers, for all key blocks, so that the rows stay in L2. The last tokens, which see most keys, start
// first.
__device__ __forceinline__ KeyWork find_piece(const BwdD128Args& a, int i, int bg) {
  const DocumentRange range(a.range, bg / a.in.groups);
  if (a.part_tokens == 0)
    return find_work(a.list, range, a.range.keys, a.in.tokens, i, bg, a.sequences_and_groups, a.in.first_token);
  const int parts = a.list.pieces / a.list.blocks, last_first = (parts - 1 - i / a.list.blocks) * a.list.blocks;
  return find_part(a.list, range, a.range.keys, a.in.tokens, last_first + i % a.list.blocks, bg, a.part_tokens,
                   a.in.first_token);
}

}  // namespace
}  // namespace triad::cuda
