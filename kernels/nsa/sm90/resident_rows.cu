// Forward of the selected branch on Hopper (bf16) with resident rows, for groups of up to 8 heads of 64.
//
// A CTA computes a tile: the query rows (t, h) of up to 96 neighbouring tokens of one sequence and group. It keeps q of
// all rows, and their outputs so far in fp32, in shared memory. It visits every block that any of the tokens lists, in
// ascending order; each visit is a step. In a step, the rows whose tokens list the block are gathered, 64 to an item:
// ldmatrix can read q at any 64 rows of shared memory as the left operand of wgmma. Two kinds of scores are computed in
// vain: those of keys after a token in its own block, and those of rows that fill up a block's last item. Unlike
// KV-stationary, the kernel writes no partial sums to device memory.
//
// Softmax. s is a row's score of a key, scaled so that its power is 2^s. A row's base b is its largest s in the first
// block that it lists. The output of the row is O / L, with sums over the keys that it sees in all blocks of its list:
//   L = sum of 2^(s - b),   O = sum of 2^(s - b) v,   v: the value of the key.
// An item computes its block's part of these sums, l and o, and then adds them to L and O in shared memory: it merges.
//
// Overflow. If a lane's part of l exceeds 2^60, the item computes l and o anew, with the row's largest s in this block
// in place of b. L and O are then relative to an exponent M that is no longer b. In general, with e the exponent that l
// and o are relative to, merging sets
//   M' = max(M, e),   L' = 2^(M - M') L + 2^(e - M') l,   O' = 2^(M - M') O + 2^(e - M') o.
//
// Order. The consumer warpgroups take the items in turn and compute them concurrently. The items of one block have
// different rows, but a row can be in the items of several blocks. An item therefore reads the bases of its rows, and
// later merges, only after all items of earlier blocks have done so. A row's blocks are added in ascending order, and
// its bits depend neither on its place in the tile nor on other rows.
//
// Two producer warps (nsa/sm90/resident_rows.cuh): one loads keys and values by TMA into a ring of stages, the other
// lists the items.
//
// Memory: q 48 KB, outputs 96 KB, four stages of keys and values 64 KB, items and sums 11 KB, and 12 bytes for each
// block of the sequence. Bound by latency: an item takes some 900 clocks, in which a scheduler of the SM issues some
// 470 instructions (tests/baselines/notes/selected.md).
#include <cmath>

#include "kernels/nsa/sm90/launch_forward.h"
#include "kernels/nsa/sm90/resident_rows.cuh"

namespace triad::cuda {
namespace {

// The attention of an item's 64 rows to one block, in the registers of a warpgroup. A lane has parts of two rows, and
// rows[i] is the number of row i in the tile. It is negative where an item of fewer than 64 rows has no row.
template <class Shape>
struct Product {
  static constexpr int kPanels = Shape::kPanels, kPanelUnits = Shape::kPanelBytes >> 4;
  int rows[2];
  float s[kBlockKeys / 8][4], o[kPanels][8][4];
  float base[2], sum[2];  // the base b of row i, and this lane's part of l, which is summed before p becomes bf16
  uint32_t p[kBlockKeys / 16][4];

  // s = q k^T. q: the address that this lane passes to ldmatrix for the first 16 columns of its row. k: the descriptor
  // of the keys.
  __device__ __forceinline__ void multiply_scores(uint32_t q, uint32_t k) {
    uint32_t left[Shape::kD / 16][4];
#pragma unroll
    for (int i = 0; i < Shape::kD / 16; ++i) load_matrices(left[i], query_chunk(q, i));
    wgmma_fence();
    wgmma_begin<Major::k>(s, left[0], k);
#pragma unroll
    for (int i = 1; i < Shape::kD / 16; ++i) wgmma<Major::k>(s, left[i], k + i / 4 * kPanelUnits + i % 4 * 2);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
  }
  // Sets the scores of keys that a row does not see to -inf. Row i sees the first seen[i] keys of the block, at least
  // one.
  __device__ __forceinline__ void mask(const int (&seen)[2]) {
#pragma unroll
    for (int j = 0; j < kBlockKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * j + fragment_column() + e % 2 >= seen[e / 2]) s[j][e] = -INFINITY;
  }
  // Reads the bases of the rows. A row in its first block has none yet: its largest score becomes its base.
  __device__ __forceinline__ void set_base(typename Shape::Shared& shared, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) base[i] = rows[i] < 0 ? INFINITY : shared.base[rows[i]];  // no row: p = 0
    if (!__any_sync(kFullWarp, fminf(base[0], base[1]) == -INFINITY)) return;
    const float largest[2] = {row_max(0) * scale, row_max(1) * scale};
    __syncwarp();  // all four lanes of a row have read its base before one of them writes
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (base[i] == -INFINITY) {
        base[i] = largest[i];
        if (threadIdx.x % 4 == 0) shared.base[rows[i]] = shared.sums[rows[i]].x = largest[i];
      }
    __syncwarp();
  }
  // Replaces the scores by p = 2^(s - base).
  __device__ __forceinline__ void softmax(float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) exponentiate(i, scale, false);
  }
  __device__ __forceinline__ bool overflows() const { return __any_sync(kFullWarp, fmaxf(sum[0], sum[1]) > kMostSum); }
  // Computes p again for the rows whose powers were too large, with their largest score in this block as base. The
  // powers have replaced the scores, so these are computed again, by mma.sync. The other rows keep their powers. k: the
  // keys of the block.
  __device__ __forceinline__ void softmax_again(uint32_t q, const unsigned char* k, const int (&seen)[2], float scale) {
    const bool over[2] = {quad_max(sum[0]) > kMostSum, quad_max(sum[1]) > kMostSum};
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kBlockKeys / 8; j += 2) {
      float again[2][4] = {};
#pragma unroll 1
      for (int i = 0; i < Shape::kD / 16; ++i) {
        uint32_t left[4], right[4];
        load_matrices(left, query_chunk(q, i));
        load_matrices(right, shared_address(k) + i / 4 * Shape::kPanelBytes +
                                 swizzled(8 * j + lane / 16 * 8 + lane % 8, i % 4 * 2 + lane / 8 % 2));
        mma_m16n8k16(again[0], left, right[0], right[1]);
        mma_m16n8k16(again[1], left, right[2], right[3]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (over[e / 2]) s[j][e] = again[0][e], s[j + 1][e] = again[1][e];
    }
    mask({over[0] ? seen[0] : kBlockKeys, over[1] ? seen[1] : kBlockKeys});
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float largest = row_max(i) * scale;
      if (over[i]) base[i] = largest;
      exponentiate(i, scale, !over[i]);
    }
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i) pack_operand(p[i], s, i);
  }
  __device__ __forceinline__ void clear() {  // a warp without rows
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) p[i][e] = 0;
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
  // Adds the item's sums to those of its rows in shared memory.
  __device__ __forceinline__ void merge(typename Shape::Shared& shared) const {
    // The addresses of this lane's part of the outputs of both rows (o_address).
    const uint32_t at[2] = {Shape::o_address(shared, max(rows[0], 0)), Shape::o_address(shared, max(rows[1], 0))};
    float2 before[2];
    float4 x[2][kGroups];
    load_outputs(x, at, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) before[i] = rows[i] < 0 ? make_float2(base[i], 0.0f) : shared.sums[rows[i]];
    const bool same = __all_sync(kFullWarp, before[0].x == base[0] && before[1].x == base[1]);
    __syncwarp();  // all four lanes of a row have read its sums before one of them writes
    if (same) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (rows[i] >= 0 && threadIdx.x % 4 == 0) shared.sums[rows[i]].y = before[i].y + sum[i];
      add_outputs(x, at, [](float before, float item, int) { return before + item; });
    } else {
      float keep[2], weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float best = fmaxf(before[i].x, base[i]);
        keep[i] = exp2_approx(before[i].x - best), weight[i] = exp2_approx(base[i] - best);
        if (rows[i] >= 0 && threadIdx.x % 4 == 0)
          shared.sums[rows[i]] = make_float2(best, fmaf(before[i].y, keep[i], weight[i] * sum[i]));
      }
      add_outputs(x, at, [&](float before, float item, int i) { return fmaf(before, keep[i], item * weight[i]); });
    }
  }

 private:
  static constexpr int kGroups = 2;  // how many groups of 16 output columns are loaded at a time

  // The address of columns [16 i, 16 i + 16) of the query row at address q.
  static __device__ __forceinline__ uint32_t query_chunk(uint32_t q, int i) {
    return (q ^ static_cast<uint32_t>(i % 4 << 5)) + i / 4 * Shape::kQueryPanelBytes;
  }
  __device__ __forceinline__ float row_max(int i) const {
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kBlockKeys / 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
    return quad_max(largest);
  }
  // keep: the scores of row i are powers already.
  __device__ __forceinline__ void exponentiate(int i, float scale, bool keep) {
    float add[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kBlockKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[j][2 * i + e];
        const float power = exp2_approx(fmaf(x, scale, -base[i]));
        add[e] += x = keep ? x : power;
      }
    sum[i] = add[0] + add[1];
  }
  // Loads the rows' outputs O of the groups of columns [first, first + kGroups) into x.
  __device__ __forceinline__ void load_outputs(float4 (&x)[2][kGroups], const uint32_t (&at)[2], int first) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int m = 0; m < kGroups; ++m)
        if (rows[i] >= 0) x[i][m] = load_shared(Shape::o_group(at[i], first + m));
  }
  // Stores O' = add(O, o, i) for both rows i. x: the first kGroups groups of O, which are loaded already.
  template <class Add>
  __device__ __forceinline__ void add_outputs(float4 (&x)[2][kGroups], const uint32_t (&at)[2], Add add) const {
#pragma unroll
    for (int first = 0; first < Shape::kD / 16; first += kGroups) {
      if (first > 0) load_outputs(x, at, first);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (rows[i] < 0) continue;
#pragma unroll
        for (int m = 0; m < kGroups; ++m) {
          const int j = 2 * (first + m);
          const float(&low)[4] = o[j / 8][j % 8], (&high)[4] = o[j / 8][j % 8 + 1];
          store_shared(Shape::o_group(at[i], first + m),
                       make_float4(add(x[i][m].x, low[2 * i], i), add(x[i][m].y, low[2 * i + 1], i),
                                   add(x[i][m].z, high[2 * i], i), add(x[i][m].w, high[2 * i + 1], i)));
        }
      }
    }
  }
};

// Computes the items of warpgroup w.
template <class Shape>
__device__ __forceinline__ void attend_items(const ResidentRowsArgs& a, const TokenTile& tile,
                                             typename Shape::Shared& shared, int w) {
  constexpr int kWarpgroups = Shape::kWarpgroups, kSlots = Shape::kSlots;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
  const uint32_t queries = shared_address(shared.q);
  barrier_wait(&shared.q_full, 0);
#pragma unroll 1
  for (int n = w;; n += kWarpgroups) {
    const int slot = n % kSlots;
    barrier_wait(&shared.item_full[slot], n / kSlots & 1);
    const typename Shape::Item& item = shared.items[slot];
    const int count = item.count, first_key = item.first_key, step = item.step, previous_first = item.previous_first,
              first_item = item.first;
    if (count == 0) return;
    // Waits until all items of earlier blocks have arrived at their barriers in `done`. To wait for those of the
    // previous step is enough, because they arrive after the items of the steps before.
    const auto wait_for_earlier_blocks = [&](Barrier* done) {
      for (int i = previous_first; i < first_item; ++i) barrier_wait(&done[i % kSlots], i / kSlots & 1);
    };
    // A warp computes 16 of the item's 64 rows. If the item has fewer rows, some warps have none. Each of the SM's four
    // schedulers runs one warp of every warpgroup, so the rows are assigned to the warps in rotation, from item to
    // item: that gives the schedulers equal work. For ldmatrix, a lane passes the address of row lane % 16 of its warp.
    const int first = (warp + n + n / kWarpgroups) % 4 * 16;
    const bool used = first < count;
    const int from = item.rows[first + lane % 16], row = from < 0 ? ~from : from;
    const uint32_t q = queries + swizzled(row, lane / 16);
    const auto& kv = shared.stage[step % Shape::kStages];
    Product<Shape> product;
#pragma unroll
    for (int i = 0; i < 2; ++i) product.rows[i] = item.rows[first + fragment_row() + 8 * i];
    barrier_wait(&shared.k_full[step % kSlots], step / kSlots & 1);
    product.multiply_scores(q, tile_descriptor(shared_address(kv.k)));
    const auto keys_seen = [&](int(&seen)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = product.rows[i] < 0 ? ~product.rows[i] : product.rows[i];
        seen[i] = tile.first + a.heads.quotient(r) + 1 - first_key;
      }
    };
    if (first_key + kBlockKeys > tile.first) {
      int seen[2];
      keys_seen(seen);
      product.mask(seen);
    }
    wait_for_earlier_blocks(shared.base_set);
    if (used) product.set_base(shared, a.scale_log2);
    barrier_arrive(&shared.base_set[slot]);  // by every lane: compute-sanitizer orders only a lane's own writes
    if (used) {
      product.softmax(a.scale_log2);
      if (product.overflows()) {
        int seen[2];
        keys_seen(seen);
        product.softmax_again(q, kv.k[0], seen, a.scale_log2);
      }
      product.pack();
    } else {
      product.clear();
    }
    barrier_arrive_warp(&shared.k_done[slot]);
    barrier_wait(&shared.v_full[step % kSlots], step / kSlots & 1);
    product.multiply_values(tile_descriptor(shared_address(kv.v)));
    barrier_arrive(&shared.v_done[slot]);
    wait_for_earlier_blocks(shared.merged);
    if (used) product.merge(shared);
    barrier_arrive(&shared.merged[slot]);
  }
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
    const uint32_t at = Shape::o_address(shared, row);
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      const float4 x = load_shared(Shape::o_group(at, 2 * m)), y = load_shared(Shape::o_group(at, 2 * m + 1));
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
  if (a.share.all != nullptr && *a.share.all == 0) return;  // the lists are alike: another kernel computes all tokens
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(aligned_shared());
  unsigned* const masks = Shape::masks(shared);
  const TokenTile tile(a);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    barrier_init(&shared.q_full, 1);
    for (int i = 0; i < Shape::kSlots; ++i) {
      barrier_init(&shared.item_full[i], 32), barrier_init(&shared.k_full[i], 1), barrier_init(&shared.v_full[i], 1);
      barrier_init(&shared.k_done[i], 4);
      for (Barrier* done : {shared.v_done, shared.base_set, shared.merged}) barrier_init(&done[i], kWarpgroup);
    }
    barrier_init_done();
  }
  for (int i = threadIdx.x; i < tile.blocks() * Shape::kWords; i += Shape::kThreads) masks[i] = 0;
  __syncthreads();
  if (threadIdx.x == Shape::kConsumers) load_queries<Shape>(a, tile, shared);
  __syncwarp();
  read_lists<Shape>(a, tile, masks);
  for (int i = threadIdx.x; i < Shape::kRows * Shape::kD / 4; i += Shape::kThreads)
    reinterpret_cast<float4*>(shared.o)[i] = make_float4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < Shape::kRows; i += Shape::kThreads)
    shared.base[i] = -INFINITY, shared.sums[i] = make_float2(-INFINITY, 0.0f);
  __syncthreads();
  if (warp == Shape::kConsumers / 32) {
    load_steps<Shape>(a, tile, shared);
  } else if (warp == Shape::kConsumers / 32 + 1) {
    list_items<Shape>(a, tile, shared);
  } else {
    if (a.combine.active())
      for (int i = threadIdx.x; i < tile.tokens * a.heads.value() * Shape::kPanels; i += Shape::kConsumers) {
        const int row = i / Shape::kPanels, token = a.heads.quotient(row);
        a.combine.prefetch(tile.b, tile.first + token, tile.g * a.heads.value() + row - token * a.heads.value(),
                           i % Shape::kPanels * kPanel);
      }
    attend_items<Shape>(a, tile, shared, warp / 4);
    named_barrier_sync<Shape::kConsumers>(1);  // after it, all items are merged
    store_rows<Shape>(a, tile, shared);
    __syncwarp();
  }
}

using Heads64 = ResidentRowsShape<64, 384, 96, 4, 4>;

}  // namespace

bool resident_rows_supports(const AttendOut& out, const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  constexpr int64_t kMostHeads = 8, kMostEntries = 64;
  return forward_sm90_supports(out, in) && in.q.size(3) == 64 && in.q.size(2) / in.k.size(2) <= kMostHeads &&
         l_sel == kBlockKeys && block_index.size(3) <= kMostEntries && in.documents.empty() &&
         ceil_div(end_token(in), l_sel) <= Heads64::kMostBlocks;
}

bool resident_rows_pays(const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  // A tile has at most kTokens tokens, so groups of fewer than 4 heads do not fill its kRows rows. In a full tile, a
  // block is listed by kRows n / blocks rows on average. From 24 rows on, items are full enough for this kernel to be
  // faster (measured, tests/baselines/notes/selected.md). The tokens of a part of a row see on average as many blocks
  // as those of a whole row of first_token + end_token tokens.
  const int64_t G = in.q.size(2) / in.k.size(2), blocks = ceil_div(first_token(in) + end_token(in), l_sel);
  return Heads64::kTokens * G >= Heads64::kRows && Heads64::kRows * block_index.size(3) >= 24 * blocks;
}

void forward_resident_rows(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                           const SelectedKeys& keys, const CombineAlong* combine, const KvStationaryShare* share) {
  using bf16 = __nv_bfloat16;
  using Shape = Heads64;
  const int64_t B = in.k.size(0), groups = in.k.size(2), G = in.q.size(2) / groups;
  const int64_t tile_tokens = std::min<int64_t>(Shape::kTokens, Shape::kRows / G);
  const int64_t tiles = ceil_div(in.q.size(1), tile_tokens), all = B * groups * tiles;
  TRIAD_CHECK(all < (int64_t{1} << 31), "{}: {} tiles do not fit 31 bits", op, all);
  ResidentRowsArgs a{.q_map = {},
                     .k_map = {},
                     .v_map = {},
                     .o = make_query_view<bf16>(in, out.o),
                     .lse = make_query_view<float>(in, out.lse),
                     .combine = combine_rows(combine, keys.lists.first_token),
                     .lists = keys.lists,
                     .share = share == nullptr ? KvStationaryShare{} : *share,
                     .n = Divisor(keys.lists.n),
                     .heads = Divisor(static_cast<int>(G)),
                     .sequences_and_groups = Divisor(static_cast<int>(B * groups)),
                     .tile_tokens = static_cast<int>(tile_tokens),
                     .tiles = static_cast<int>(tiles),
                     .scale_log2 = kLog2e / std::sqrt(static_cast<float>(in.q.size(3)))};
  if (!ctx.planning) {
    const auto map = [&](const ConstTensor& t) {
      return make_box_map(make_view<const bf16>(t), B, t.size(1), groups, kBlockKeys);
    };
    a.q_map = make_query_map(make_view<const bf16>(in.q), B, in.q.size(1), in.q.size(2), static_cast<int>(G),
                             static_cast<int>(tile_tokens));
    a.k_map = map(in.k), a.v_map = map(in.v);
  }
  launch(ctx, op, fwd_resident_rows_kernel<Shape>, dim3(static_cast<unsigned>(all)), dim3(Shape::kThreads),
         Shape::shared_bytes(keys.lists.blocks), a);
}

}  // namespace triad::cuda
