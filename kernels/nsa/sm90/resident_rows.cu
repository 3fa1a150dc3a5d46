// Forward of the selected branch on Hopper (bf16) for small groups, with resident rows: a CTA keeps the rows (t, h) of
// neighbouring tokens of one sequence and group in shared memory, q and the running fp32 sums, and visits every block
// that any of these tokens lists, in ascending order. Scores are computed in vain only after a token in its own block,
// and for the rows that fill up a block's last item. Unlike KV-stationary, no partial sum goes through device memory.
//
// For each block the rows of the tokens that list it are gathered, 64 to an item: ldmatrix reads q at any 64 rows of
// shared memory as the left operand of wgmma. With s = q k^T, m = the largest scaled score of the row in this block,
// p = 2^(s - m) and o = p v, each row of the item is then merged into its running values in shared memory, which are
// the maximum M, the sum L of its probabilities and the output O (before the division by L). With M' = max(M, m):
//   O' = 2^(M - M') O + 2^(m - M') o;  L' = 2^(M - M') L + 2^(m - M') (sum of p);  then M = M', L = L', O = O'.
// The three consumer warpgroups take the items in turn and compute them concurrently. They merge one after the other,
// in the order of the items (WarpgroupTurns), because a row can be in the items of several blocks. So a row's blocks
// are added in ascending order, and its bits depend neither on its neighbours nor on its place in the tile.
//
// A producer warp makes the list of each block's tokens from bit masks and loads keys and values by TMA into a ring
// (nsa/sm90/resident_rows.cuh). At heads of 128 two CTAs of a cluster have neighbouring tiles and visit the same
// blocks: each loads half of the columns of K and V, for both.
//
// Memory: q 48 KB, o 96 KB, K and V 64 KB: 96 tokens of 4 heads of 64 with four stages, or 48 tokens of 4 heads of 128
// with two. Masks take the rest. Bound by latency: an item takes 970 clocks, its instructions 550 issue slots of a
// scheduler, and its 56 KB in shared memory 450. A candidate (KernelChoice): tests/baselines/notes/selected.md says
// where it is faster.
#include <cmath>

#include "kernels/nsa/sm90/launch_forward.h"
#include "kernels/nsa/sm90/resident_rows.cuh"

namespace triad::cuda {
namespace {

// The attention of an item's 64 rows to one block, in the registers of a warpgroup. A lane has parts of two rows of
// o = p v, and for both rows the largest scaled score (row_max) and the sum of p (sum), taken before p becomes bf16.
template <class Shape>
struct Item {
  static constexpr int kPanels = Shape::kPanels, kPanelUnits = Shape::kPanelBytes >> 4;
  float s[kBlockKeys / 8][4], o[kPanels][8][4], row_max[2], sum[2];
  float keep[2], weight[2];  // set by merge_sums(): the factors of the row's earlier sums and of this item's
  uint32_t p[kBlockKeys / 16][4];

  // s = q k^T. q: the address that this lane passes to ldmatrix for the first 16 columns of its row. k: the descriptor
  // of the keys.
  __device__ __forceinline__ void multiply_scores(uint32_t q, uint32_t k) {
    uint32_t left[Shape::kD / 16][4];
#pragma unroll
    for (int i = 0; i < Shape::kD / 16; ++i)
      load_matrices(left[i], (q ^ static_cast<uint32_t>(i % 4 << 5)) + i / 4 * Shape::kQueryPanelBytes);
    wgmma_fence();
    wgmma_begin<Major::k>(s, left[0], k);
#pragma unroll
    for (int i = 1; i < Shape::kD / 16; ++i) wgmma<Major::k>(s, left[i], k + i / 4 * kPanelUnits + i % 4 * 2);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
  }
  // Turns the scores into p. Row i of the lane sees the first seen[i] keys, at least one. In a warp without rows
  // (`used` is false) p is zero.
  __device__ __forceinline__ void softmax(float scale, const int (&seen)[2], bool used) {
    if (!used) {
#pragma unroll
      for (int i = 0; i < kBlockKeys / 16; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) p[i][e] = 0;
      row_max[0] = row_max[1] = -INFINITY, sum[0] = sum[1] = 0.0f;
      return;
    }
    if (min(seen[0], seen[1]) < kBlockKeys) {
#pragma unroll
      for (int j = 0; j < kBlockKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (8 * j + fragment_column() + e % 2 >= seen[e / 2]) s[j][e] = -INFINITY;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = -INFINITY, add[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kBlockKeys / 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
      row_max[i] = quad_max(largest) * scale;
      const float minus = row_max[i] == -INFINITY ? 0.0f : -row_max[i];
#pragma unroll
      for (int j = 0; j < kBlockKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) add[e] += s[j][2 * i + e] = exp2_approx(fmaf(s[j][2 * i + e], scale, minus));
      sum[i] = add[0] + add[1];
    }
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i) pack_operand(p[i], s, i);
  }
  // o = p v. v: the descriptor of the values.
  __device__ __forceinline__ void multiply_values(uint32_t v) {
#pragma unroll
    for (auto& panel : o) leave_unset(panel);
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
      for (int i = 0; i < kBlockKeys / 16; ++i)
        wgmma<Major::mn>(o[panel], p[i], v + panel * kPanelUnits + i * (16 * kPanelRowBytes >> 4), i > 0);
    wgmma_commit();
    sum[0] = quad_sum(sum[0]), sum[1] = quad_sum(sum[1]);
    wgmma_wait<0>();
#pragma unroll
    for (auto& panel : o) pin(panel);
  }
  // Merges the item's row_max and sum into those of rows[0] and rows[1] of the tile; a negative number is no row.
  __device__ __forceinline__ void merge_sums(typename Shape::Shared& shared, const int (&rows)[2]) {
    float2 merged[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 before = shared.sums[max(rows[i], 0)];
      const float best = fmaxf(before.x, row_max[i]), base = best == -INFINITY ? 0.0f : best;
      keep[i] = exp2_approx(before.x - base), weight[i] = exp2_approx(row_max[i] - base);
      merged[i] = make_float2(best, fmaf(before.y, keep[i], weight[i] * sum[i]));
    }
    __syncwarp();  // all four lanes of a row have read its sums before one of them writes
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (rows[i] >= 0 && threadIdx.x % 4 == 0) shared.sums[rows[i]] = merged[i];
  }
  // After merge_sums: merges half kHalf of the columns of o into that of the rows.
  template <int kHalf>
  __device__ __forceinline__ void merge_half(typename Shape::Shared& shared, const int (&rows)[2]) const {
    constexpr int kGroups = Shape::kD / 32;
    float4 x[2][kGroups];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int m = 0; m < kGroups; ++m)
        x[i][m] = rows[i] >= 0 ? *Shape::o_at(shared, rows[i], kHalf * kGroups + m) : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        const int j = 2 * (kHalf * kGroups + m);
        const float(&low)[4] = o[j / 8][j % 8], (&high)[4] = o[j / 8][j % 8 + 1];
        const float4 y = {
            fmaf(x[i][m].x, keep[i], low[2 * i] * weight[i]), fmaf(x[i][m].y, keep[i], low[2 * i + 1] * weight[i]),
            fmaf(x[i][m].z, keep[i], high[2 * i] * weight[i]), fmaf(x[i][m].w, keep[i], high[2 * i + 1] * weight[i])};
        if (rows[i] >= 0) *Shape::o_at(shared, rows[i], kHalf * kGroups + m) = y;
      }
  }
};

// Releases a stage's keys or values: this warp does not read them any more. In a cluster the CTAs load for each other,
// so each has to know.
template <class Shape>
__device__ __forceinline__ void release(Barrier* empty) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if constexpr (Shape::kCtas == 1) {
    if (lane == 0) barrier_arrive(empty);
  } else if (lane < Shape::kCtas) {
    barrier_arrive_at(empty, lane);
  }
}

// Computes the items of warpgroup w. steps: the number of steps.
template <class Shape>
__device__ __forceinline__ void attend_items(const ResidentRowsArgs& a, const TokenTile& tile,
                                             typename Shape::Shared& shared, int steps, int w) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32, G = a.heads.value();
  const uint32_t q = shared_address(shared.q);
  // Each half of the columns has an order of its own: the next warpgroup merges the first half of its item during the
  // second half of this one.
  const WarpgroupTurns<Shape::kWarpgroups, 0> first_half{w};
  const WarpgroupTurns<Shape::kWarpgroups, 1> second_half{w};
  first_half.begin(), second_half.begin();
  PipelineState<Shape::kStages> state;
  int done = 0;  // the items of earlier steps
  barrier_wait(&shared.q_full, 0);
#pragma unroll 1
  for (int n = 0; n < steps; ++n, state.advance()) {
    barrier_wait(&shared.k_full[state.index], state.phase);
    const typename Shape::Step& step = shared.steps[state.index];
    const int rows = step.count * G, first_key = step.block * kBlockKeys, items = ceil_div(rows, kItemRows);
    const uint32_t k = tile_descriptor(shared_address(shared.stage[state.index].k)),
                   v = tile_descriptor(shared_address(shared.stage[state.index].v));
    const int next = done % Shape::kWarpgroups;  // the warpgroup of the step's first item
    const int first = w >= next ? w - next : w - next + Shape::kWarpgroups;
#pragma unroll 1
    for (int item = first; item < items; item += Shape::kWarpgroups) {
      const bool last = item + Shape::kWarpgroups >= items;
      // Each warp has 16 rows. In an item of fewer than 64 rows some warps have none; which ones changes from item to
      // item, so that the schedulers of the SM, which have one warp each of a warpgroup, have equal work. This lane
      // passes row lane % 16 of its warp to ldmatrix. The rows past the last one repeat it.
      const int warp_first = item * kItemRows + (warp + done + item) % 4 * 16,
                at = min(warp_first + lane % 16, rows - 1);
      const int place = a.heads.quotient(at), token = step.tokens[place], row = token * G + at - place * G;
      const bool used = warp_first < rows;
      Item<Shape> product;
      product.multiply_scores(q + swizzled(row, lane / 16), k);
      int own[2], seen[2];  // the lane's rows of the products, and the keys that they see
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int from = fragment_row() + 8 * i;
        seen[i] = tile.first + __shfl_sync(kFullWarp, token, from) + 1 - first_key;
        own[i] = __shfl_sync(kFullWarp, row, from);
        if (warp_first + from >= rows) own[i] = -1;
      }
      if (last) release<Shape>(&shared.k_empty[state.index]);
      product.softmax(a.scale_log2, seen, used);
      barrier_wait(&shared.v_full[state.index], state.phase);
      product.multiply_values(v);
      if (last) release<Shape>(&shared.v_empty[state.index]);
      first_half.wait();
      if (used) product.merge_sums(shared, own), product.template merge_half<0>(shared, own);
      first_half.pass_on();
      second_half.wait();
      if (used) product.template merge_half<1>(shared, own);
      second_half.pass_on();
    }
    if (first >= items) {
      // A release must not count for the stage's previous step, in which another warpgroup may still be. Once the stage
      // is full again, that step is over.
      release<Shape>(&shared.k_empty[state.index]);
      barrier_wait(&shared.v_full[state.index], state.phase);
      release<Shape>(&shared.v_empty[state.index]);
    }
    done += items;
  }
  if (w == done % Shape::kWarpgroups) first_half.wait(), second_half.wait();  // consumes the signals of the last item
}

// Writes o and lse of the tile's rows and, if requested, the gated sum of the branches. A warp writes eight rows at a
// time, four lanes each.
template <class Shape>
__device__ __forceinline__ void store_rows(const ResidentRowsArgs& a, const TokenTile& tile,
                                           typename Shape::Shared& shared) {
  constexpr int kVectors = Shape::kD / 32;  // 16-byte vectors of a lane
  const int lane = threadIdx.x % 32, c = lane % 4, G = a.heads.value(), rows = tile.tokens * G;
#pragma unroll 1
  for (int row0 = threadIdx.x / 32 * 8; row0 < rows; row0 += Shape::kConsumers / 4) {
    const int row = min(row0 + lane / 4, rows - 1), token = a.heads.quotient(row);
    const int t = tile.first + token, h = tile.g * G + row - token * G;
    const bool exists = row0 + lane / 4 < rows;
    const float2 sums = shared.sums[row];
    const float inverse = sums.y == 0.0f ? 0.0f : 1.0f / sums.y;
    uint4 columns[kVectors];
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      const float4 x = *Shape::o_at(shared, row, 2 * m), y = *Shape::o_at(shared, row, 2 * m + 1);
      uint32_t words[4] = {pack_bf16(x.x * inverse, x.y * inverse), pack_bf16(x.z * inverse, x.w * inverse),
                           pack_bf16(y.x * inverse, y.y * inverse), pack_bf16(y.z * inverse, y.w * inverse)};
      transpose_quad(words);
      columns[m] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (!exists) continue;
#pragma unroll
    for (int m = 0; m < kVectors; ++m) *reinterpret_cast<uint4*>(a.o.at(tile.b, t, h) + 32 * m + 8 * c) = columns[m];
    if (c == 0)
      *a.lse.at(tile.b, t, h) = sums.y == 0.0f ? -INFINITY : (sums.x + log2f(sums.y)) * std::numbers::ln2_v<float>;
    if (!a.combine.active()) continue;
    const CombineRows::Row to(a.combine, tile.b, t, h, tile.g);
    CombineRows::Row::Others others[kVectors];
#pragma unroll
    for (int m = 0; m < kVectors; ++m) others[m] = to.others(32 * m + 8 * c);
#pragma unroll
    for (int m = 0; m < kVectors; ++m) to.store(32 * m + 8 * c, columns[m], others[m]);
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    fwd_resident_rows_kernel(const __grid_constant__ ResidentRowsArgs a) {
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(aligned_shared());
  unsigned* const masks = Shape::masks(shared);
  const TokenTile tile(a, Shape::kCtas);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0), blocks = tile.blocks();
  if (threadIdx.x == 0) {
    constexpr int kReleases = Shape::kConsumers / 32 * Shape::kCtas;
    barrier_init(&shared.q_full, 1);
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(&shared.k_full[i], 32), barrier_init(&shared.v_full[i], 1);
      barrier_init(&shared.k_empty[i], kReleases), barrier_init(&shared.v_empty[i], kReleases);
    }
    barrier_init_done();
  }
  for (int i = threadIdx.x; i < blocks * Shape::kWords; i += Shape::kThreads) masks[i] = 0;
  __syncthreads();
  if (threadIdx.x == Shape::kConsumers) load_queries<Shape>(a, tile, shared);
  __syncwarp();
  read_lists<Shape>(a, tile, masks);
  for (int i = threadIdx.x; i < Shape::kRows * Shape::kD / 4; i += Shape::kThreads)
    reinterpret_cast<float4*>(shared.o)[i] = make_float4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < Shape::kRows; i += Shape::kThreads) shared.sums[i] = make_float2(-INFINITY, 0.0f);
  __syncthreads();
  const int steps = count_steps<Shape>(masks, blocks);
  if constexpr (Shape::kCtas > 1) sync_cluster();  // after it, the barriers of all CTAs are initialised
  if (warp == Shape::kConsumers / 32) {
    produce_steps<Shape>(a, tile, shared);
  } else {
    if (a.combine.active())
      for (int i = threadIdx.x; i < tile.tokens * a.heads.value() * Shape::kPanels; i += Shape::kConsumers) {
        const int row = i / Shape::kPanels, token = a.heads.quotient(row);
        a.combine.prefetch(tile.b, tile.first + token, tile.g * a.heads.value() + row - token * a.heads.value(),
                           i % Shape::kPanels * kPanel);
      }
    attend_items<Shape>(a, tile, shared, steps, warp / 4);
    named_barrier_sync<Shape::kConsumers>(1);  // after it, all items are merged
    store_rows<Shape>(a, tile, shared);
    __syncwarp();
  }
  if constexpr (Shape::kCtas > 1) sync_cluster();  // no CTA ends while another one may arrive at its barriers
}

template <class Shape>
void launch_resident_rows(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                          const SelectedKeys& keys, const CombineAlong* combine) {
  using bf16 = __nv_bfloat16;
  const int64_t B = in.k.size(0), groups = in.k.size(2), G = in.q.size(2) / groups;
  const int64_t tile_tokens = std::min<int64_t>(Shape::kTokens, Shape::kRows / G);
  const int64_t clusters = ceil_div(in.q.size(1), Shape::kCtas * tile_tokens), all = B * groups * clusters;
  TRIAD_CHECK(all * Shape::kCtas < (int64_t{1} << 31), "{}: {} tiles do not fit 31 bits", op, all * Shape::kCtas);
  ResidentRowsArgs a{.q_map = {},
                     .k_map = {},
                     .v_map = {},
                     .o = make_query_view<bf16>(in, out.o),
                     .lse = make_query_view<float>(in, out.lse),
                     .combine = combine_rows(combine, keys.lists.first_token),
                     .lists = keys.lists,
                     .n = Divisor(keys.lists.n),
                     .heads = Divisor(static_cast<int>(G)),
                     .sequences_and_groups = Divisor(static_cast<int>(B * groups)),
                     .tile_tokens = static_cast<int>(tile_tokens),
                     .clusters = static_cast<int>(clusters),
                     .scale_log2 = kLog2e / std::sqrt(static_cast<float>(in.q.size(3)))};
  if (!ctx.planning) {
    const auto map = [&](const ConstTensor& t) {
      return make_box_map(make_view<const bf16>(t), B, t.size(1), groups, kBlockKeys);
    };
    a.q_map = make_query_map(make_view<const bf16>(in.q), B, in.q.size(1), in.q.size(2), static_cast<int>(G),
                             static_cast<int>(tile_tokens));
    a.k_map = map(in.k), a.v_map = map(in.v);
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Shape::kCtas, 1, 1};
  launch_with(ctx, {&cluster, Shape::kCtas > 1 ? size_t{1} : size_t{0}}, op, fwd_resident_rows_kernel<Shape>,
              dim3(static_cast<unsigned>(all * Shape::kCtas)), dim3(Shape::kThreads),
              Shape::shared_bytes(keys.lists.blocks), a);
}

using Heads64 = ResidentRowsShape<64, 384, 4, 1, 4>;
using Heads128 = ResidentRowsShape<128, 192, 2, 2, 3>;

}  // namespace

bool resident_rows_supports(const AttendOut& out, const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  constexpr int64_t kMostHeads = 8;
  return forward_sm90_supports(out, in) && in.q.size(3) <= 128 && in.q.size(2) / in.k.size(2) <= kMostHeads &&
         l_sel == kBlockKeys && block_index.size(3) <= 64 && in.documents.empty() &&
         ceil_div(end_token(in), l_sel) <= kMostBlocks;
}

void forward_resident_rows(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                           const SelectedKeys& keys, const CombineAlong* combine) {
  if (in.q.size(3) == 64)
    launch_resident_rows<Heads64>(ctx, op, out, in, keys, combine);
  else
    launch_resident_rows<Heads128>(ctx, op, out, in, keys, combine);
}

}  // namespace triad::cuda
