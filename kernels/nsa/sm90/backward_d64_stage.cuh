// The backward for head width 64 (nsa/sm90/backward_d64.cu has the design): its arguments, the stages in shared memory,
// a CTA's work, the producer warpgroup and the dQ warpgroup.
#pragma once
#include "kernels/hopper/tma.cuh"
#include "kernels/nsa/sm90/backward.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

// ---- arguments and shared memory ----

struct BwdD64Args {
  Attend<bf16> in;
  View<const bf16> dout;
  const RowStats* row_stats;
  View<const float> rounding_unit;
  View<float> dq;
  GradView dk, dv;
  KeyRange range;
  KeyWorkList list;
  int bgs;
  int piece_tokens;  // contiguous rows are cut into pieces this many tokens long
  int near;          // listed rows: how many groups (over all sequences) run at the same time
};

constexpr int kStageRows = 64, kStepRows = 32, kTileBytes = kRows * kPanelRowBytes;
constexpr int kCtaThreads = 4 * kWarpgroup, kRoleWarps = 4;
// Registers per thread for each role. Their sum over the four warpgroups must not exceed 4 x 128, what the launch
// assigns.
constexpr int kMmaRegisters = 192, kDqRegisters = 72, kProducerRegisters = 56;

struct __align__(1024) Stage {
  unsigned char q[kTileBytes], dout[kTileBytes];
  RowStats row_stats[kStageRows];
  int2 range[kStageRows];  // the first key that the row sees, and where its keys end
  float rounding_unit[kStageRows];
  int dq_at[kStageRows];                      // the row's dq offset, in units of 16 bytes; -1: the row doesn't exist
  unsigned all_seen[kStageRows / kStepRows];  // bit i: all the step's rows see all 64 keys in tile i
};

template <class Rows>
struct Shared {
  static constexpr int kTiles = Rows::kAlternates ? 1 : 2, kStages = Rows::kAlternates ? 9 : 8;
  static constexpr int kBuffers = Rows::kAlternates ? 4 : 2;
  static constexpr int kMmaWarps = Rows::kAlternates ? 4 : 8;  // MMA warps that read each stage
  Stage stages[kStages];
  unsigned char k[kTiles][kTileBytes];  // the columns are permuted (mma_dq has the reason)
  unsigned char ds[kBuffers][kTiles][kTileBytes];
  Barrier full[kStages], empty[kStages], ds_full[kBuffers], ds_empty[kBuffers];
  int listed[Rows::kListed ? kWorkTokens : 1];
};

// A CTA's work: the keys [tile0, tile_end) in sequence b and group g, and the rows for `count` tokens that see them.
// `first` is the first token, or for a listed block the first entry in its list. slot: where the partial sums are
// stored; negative if this task has all the block's rows. block0: the block's first key. merged: whether the keys come
// from several short documents (KeyWork::merged).
struct Task {
  int b, g, bg, tile0, tile_end, first, count, slot, block0;
  bool merged;
};

template <class Rows>
__device__ __forceinline__ bool find_task(Task& task, const BwdD64Args& a) {
  // For listed rows, a few groups (over all sequences) run at a time, so that the rows that the running CTAs gather fit
  // into L2. Within these groups the first key blocks start first, because most rows list them.
  const int pieces = gridDim.x / a.bgs, first_bg = Rows::kListed ? blockIdx.x / (pieces * a.near) * a.near : 0;
  const int at_work = Rows::kListed ? min(a.near, a.bgs - first_bg) : a.bgs;
  const int in_order = blockIdx.x - first_bg * pieces, bg = first_bg + in_order % at_work, piece = in_order / at_work;
  KeyWork work;
  if constexpr (Rows::kListed) {
    work = a.list.work[static_cast<int64_t>(piece) * a.bgs + bg];
  } else {
    work = find_part(a.list, DocumentRange(a.range, bg / a.in.groups), a.range.keys, a.in.tokens, piece, bg,
                     a.piece_tokens, a.in.first_token);
  }
  const int2 keys = keys_of_block(a.list, a.range, bg / a.in.groups, work.block, Rows::kListed ? work.merged() : 0);
  const int tile0 = keys.x + static_cast<int>(blockIdx.y) * Shared<Rows>::kTiles * kRows;
  task = {bg / a.in.groups, bg % a.in.groups, bg,        tile0,  keys.y,
          work.first,       work.count,       work.slot, keys.x, Rows::kListed && work.merged() > 0};
  return work.count >= 0 && tile0 < keys.y;
}

// ---- producer warpgroup ----

template <class Rows>
__device__ __forceinline__ void produce_stages(Shared<Rows>& shared, const BwdD64Args& a, const Task& task, int warp,
                                               int lane) {
  constexpr int kStages = Shared<Rows>::kStages;
  const int G = a.in.heads.value(), rows = task.count * G, steps = ceil_div(rows, kStageRows);
  // In tensors with one row per query, rows are counted from the call's first token.
  const int first_token = a.in.first_token;
  const RowStats* const row_stats = a.row_stats + static_cast<int64_t>(task.bg) * (a.in.tokens - first_token) * G;
  const float* const rounding_unit = a.rounding_unit.at(task.b, first_token, task.g * G);
  const int chunk = lane % 8;
  const bf16* const q_chunk = a.in.q.at(task.b, first_token, task.g * G) + 8 * chunk;
  const bf16* const dout_chunk = a.dout.at(task.b, first_token, task.g * G) + 8 * chunk;
  // q's strides in units of 16 bytes
  const int q_row = static_cast<int>(a.in.q.row / 8), q_head = static_cast<int>(a.in.q.head / 8);
  const int dout_row = static_cast<int>(a.dout.row / 8), dout_head = static_cast<int>(a.dout.head / 8);
  const int dq_row = static_cast<int>(a.dq.row / 4), dq_head = static_cast<int>(a.dq.head / 4);
  decltype(auto) visible = range_of_rows<Rows::kListed>(a.range, task.b);
  const int start = Rows::kListed ? 0 : first_step(a.range, a.in.tokens, steps, task.first * G / kStageRows);
  for (int n = warp; n < steps; n += kRoleWarps) {
    const int row0 = (n + start) % steps * kStageRows;
    const int slot = n % kStages, use = n / kStages;
    if (use > 0) barrier_wait(&shared.empty[slot], (use - 1) & 1);
    Stage& stage = shared.stages[slot];
#pragma unroll 1
    for (int half = 0; half < kStageRows; half += 32) {
      // A lane computes one row's address, and eight lanes copy it. Rows past the end are copies of the last row, with
      // statistics that make p = 0.
      const int r = half + lane, row = min(row0 + r, rows - 1), in_list = a.in.heads.quotient(row);
      const int t = Rows::kListed ? shared.listed[in_list] : task.first + in_list, h = row - in_list * G;
      const int at = t - first_token, q_at = at * q_row + h * q_head, dout_at = at * dout_row + h * dout_head;
      const int to_row = swizzled(half + lane / 8, chunk);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int to = (to_row ^ (i % 2 * 4 << 4)) + i * 4 * kPanelRowBytes;
        const int64_t q_from = __shfl_sync(kFullWarp, q_at, 4 * i + lane / 8);
        const int64_t dout_from = __shfl_sync(kFullWarp, dout_at, 4 * i + lane / 8);
        copy_async_16(stage.q + to, q_chunk + 8 * q_from, 16);
        copy_async_16(stage.dout + to, dout_chunk + 8 * dout_from, 16);
      }
      const bool exists = row0 + r < rows;
      if (exists)
        copy_async_8(&stage.row_stats[r], row_stats + static_cast<int64_t>(at) * G + h);
      else
        stage.row_stats[r] = no_weight();
      copy_async_4(&stage.rounding_unit[r], rounding_unit + at * a.rounding_unit.row + h * a.rounding_unit.head, true);
      const int low = Rows::kListed && task.merged ? a.range.documents.row(task.b).begins[t] : visible.low(t);
      const int2 range = make_int2(low, visible.high(t));
      stage.range[r] = range;
      unsigned all_seen = 0;
#pragma unroll
      for (int tile = 0; tile < Shared<Rows>::kTiles; ++tile) {
        const int key0 = task.tile0 + kRows * tile, end = key0 + kRows;
        if (__all_sync(kFullWarp, range.x <= key0 && range.y >= end && task.tile_end >= end)) all_seen |= 1u << tile;
      }
      if (lane == 0) stage.all_seen[half / kStepRows] = all_seen;
      stage.dq_at[r] = exists ? at * dq_row + h * dq_head : -1;
    }
    barrier_arrive_after_copies(&shared.full[slot]);
    barrier_arrive(&shared.full[slot]);  // covers what this lane has stored without cp.async
  }
}

// ---- dQ warpgroup: MMA, then additions to global memory ----

// The permuted k's column 16 i + 2 q + e is k's column 16 i + 4 q + e, and column 16 i + 8 + 2 q + e is k's column 16 i
// + 4 q + 2 + e (q < 4, e < 2). Lane q in a quad receives two values from each 8-column group in the product: with this
// order, two neighbouring groups' values are four neighbouring dq columns.
template <class Rows>
__device__ __forceinline__ void mma_dq(Shared<Rows>& shared, const BwdD64Args& a, const Task& task, int warp,
                                       int lane) {
  constexpr int kStages = Shared<Rows>::kStages, kBuffers = Shared<Rows>::kBuffers;
  constexpr int kDeep = Shared<Rows>::kTiles * kRows / 16;
  const int rows = task.count * a.in.heads.value(), steps = ceil_div(rows, kStageRows);
  float* const base = a.dq.at(task.b, a.in.first_token, task.g * a.in.heads.value()) + 4 * (lane % 4);
  const uint32_t k = tile_descriptor(shared_address(shared.k));
  float dq[kPanel / 8][4];
  for (int n = 0; n < steps; ++n) {
    const int buffer = n % kBuffers, slot = n % kStages;
    barrier_wait(&shared.ds_full[buffer], n / kBuffers & 1);
    const uint32_t ds = tile_descriptor(shared_address(shared.ds[buffer]));
    wgmma_fence();
    wgmma_begin<Major::mn, Major::mn>(dq, ds, k);
#pragma unroll
    for (int i = 1; i < kDeep; ++i)
      wgmma<Major::mn, Major::mn>(dq, ds + i * (16 * kPanelRowBytes >> 4), k + i * (16 * kPanelRowBytes >> 4));
    wgmma_commit();
    int at[2];
    float rounding_unit[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * warp + lane / 4 + 8 * i;
      at[i] = shared.stages[slot].dq_at[row], rounding_unit[i] = shared.stages[slot].rounding_unit[row];
    }
    barrier_arrive(&shared.empty[slot]);
    wgmma_wait<0>();
    pin(dq);
    if (lane == 0) barrier_arrive(&shared.ds_empty[buffer]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at[i] < 0) continue;
      float* const to = base + 4 * static_cast<int64_t>(at[i]);
      const auto rounded = [&](float x) { return round_to_unit(x, a.in.scale, rounding_unit[i]); };
#pragma unroll
      for (int j = 0; j < kPanel / 8; j += 2)
        add_four(to + 8 * j, rounded(dq[j][2 * i]), rounded(dq[j][2 * i + 1]), rounded(dq[j + 1][2 * i]),
                 rounded(dq[j + 1][2 * i + 1]));
    }
  }
}

}  // namespace
}  // namespace triad::cuda
