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
// Overflow. If a lane's part of l exceeds 2^60, the row's powers are computed again before the product with v, with its
// largest s in this block in place of b. L and O are then relative to an exponent M that is no longer b. In general,
// with e the exponent that l and o are relative to, merging sets
//   M' = max(M, e),   L' = 2^(M - M') L + 2^(e - M') l,   O' = 2^(M - M') O + 2^(e - M') o.
//
// Order. The consumer warpgroups take the items in turn and compute them concurrently. The items of one block have
// different rows, but a row can be in the items of several blocks. An item therefore reads the bases of its rows only
// after all items of earlier blocks have set theirs, and merges only after all of these have merged. A row's blocks are
// added in ascending order, and its bits depend neither on its place in the tile nor on other rows.
//
// Four producer warps (nsa/sm90/resident_rows.cuh): one loads keys and values by TMA into a ring of stages, the others
// list the items.
//
// Memory: q 48 KB, outputs 96 KB, four stages of keys and values 64 KB, items and sums 11 KB, and 12 bytes for each
// block of the sequence. Bound by latency: an SM finishes an item every 830 clocks or so, and each of its schedulers
// issues some 440 instructions for it, most of which are not arithmetic. To save instructions, the numbers of an item
// are uniform, so that addresses, descriptors and branches are; stores are predicated. To hide latency, the next item
// is read while a product runs (measured: tests/baselines/notes/selected.md).
#include <cmath>

#include "kernels/nsa/sm90/launch_forward.h"
#include "kernels/nsa/sm90/resident_rows.cuh"

namespace triad::cuda {
namespace {

// Returns x. The compiler has to keep it in a register, and cannot compute it again wherever it is used.
template <class T>
__device__ __forceinline__ T keep(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The attention of an item's 64 rows to one block, in the registers of a warpgroup. A lane has parts of two rows. If an
// item has fewer than 64 rows, the rest are copies of the last row. In a warp that has rows, p of the copies is 0. A
// warp without rows only issues the products: its p is unset, and its o is not used.
struct Product {
  int rows[2];  // the numbers of this lane's rows in the tile
  bool exists[2];
  float s[kBlockKeys / 8][4], o[kHead / 8][4];
  float base[2], sum[2];  // the base b of row i, and this lane's part of l, which is summed before p becomes bf16
  uint32_t queries[kHead / 16][4], p[kBlockKeys / 16][4];

  // q: the address that this lane passes to ldmatrix for the first 16 columns of its row.
  __device__ __forceinline__ void load_queries(uint32_t q) {
#pragma unroll
    for (int i = 0; i < kHead / 16; ++i) load_matrices(queries[i], query_columns(q, i));
  }
  // s = q k^T. k: the descriptor of the keys.
  __device__ __forceinline__ void multiply_scores(uint32_t k) {
    wgmma_fence();
    wgmma_begin<Major::k>(s, queries[0], k);
#pragma unroll
    for (int i = 1; i < kHead / 16; ++i) wgmma<Major::k>(s, queries[i], k + 2 * i);
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
  __device__ __forceinline__ void set_base(Shared& shared, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) base[i] = exists[i] ? shared.base[rows[i]] : INFINITY;
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
  // p = 2^(s - base).
  __device__ __forceinline__ void softmax(float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] = exponentiate(i, scale);
#pragma unroll
    for (int k = 0; k < kBlockKeys / 16; ++k) pack_operand(p[k], s, k);
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
      s[j][0] = s[j][1] = s[j][2] = s[j][3] = s[j + 1][0] = s[j + 1][1] = s[j + 1][2] = s[j + 1][3] = 0.0f;
#pragma unroll 1
      for (int i = 0; i < kHead / 16; ++i) {
        uint32_t left[4], right[4];
        load_matrices(left, query_columns(q, i));
        load_matrices(right, shared_address(k) + swizzled(8 * j + lane / 16 * 8 + lane % 8, i * 2 + lane / 8 % 2));
        mma_m16n8k16(s[j], left, right[0], right[1]);
        mma_m16n8k16(s[j + 1], left, right[2], right[3]);
      }
    }
    mask(seen);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float largest = row_max(i) * scale;
      if (over[i]) base[i] = largest;
      const float again = exponentiate(i, scale);
      if (over[i]) sum[i] = again;
    }
#pragma unroll
    for (int k = 0; k < kBlockKeys / 16; ++k) {
      uint32_t again[4];
      pack_operand(again, s, k);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (over[e % 2]) p[k][e] = again[e];
    }
  }
  // Begins o = p v. v: the descriptor of the values. Until end_values(), o and p must not be used.
  __device__ __forceinline__ void begin_values(uint32_t v) {
    leave_unset(o);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i) wgmma<Major::mn>(o, p[i], v + i * (16 * kPanelRowBytes >> 4), i > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void end_values() {
    wgmma_wait<0>();
    pin(o);
  }
  // Adds the item's sums to those of its rows in shared memory.
  __device__ __forceinline__ void merge(Shared& shared) {
    const uint32_t at[2] = {keep(output_address(shared, rows[0])), keep(output_address(shared, rows[1]))};
    float2 before[2];
    float4 x[2][kGroups];
    load_outputs(x, at, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) before[i] = exists[i] ? shared.sums[rows[i]] : make_float2(base[i], 0.0f);
    sum[0] = quad_sum(sum[0]), sum[1] = quad_sum(sum[1]);
    const bool same = __all_sync(kFullWarp, before[0].x == base[0] && before[1].x == base[1]);
    __syncwarp();  // all four lanes of a row have read its sums before one of them writes
    if (same) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (exists[i] && threadIdx.x % 4 == 0) shared.sums[rows[i]].y = before[i].y + sum[i];
      add_outputs(x, at, [](float before, float item, int) { return before + item; });
    } else {
      float old_factor[2], item_factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float best = fmaxf(before[i].x, base[i]);
        old_factor[i] = exp2_approx(before[i].x - best), item_factor[i] = exp2_approx(base[i] - best);
        if (exists[i] && threadIdx.x % 4 == 0)
          shared.sums[rows[i]] = make_float2(best, fmaf(before[i].y, old_factor[i], item_factor[i] * sum[i]));
      }
      add_outputs(x, at,
                  [&](float before, float item, int i) { return fmaf(before, old_factor[i], item * item_factor[i]); });
    }
  }

 private:
  static constexpr int kGroups = 2;  // how many groups of 16 columns of O are loaded at a time

  // The address of columns [16 i, 16 i + 16) of the query row at address q.
  static __device__ __forceinline__ uint32_t query_columns(uint32_t q, int i) { return q ^ i << 5; }
  __device__ __forceinline__ float row_max(int i) const {
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kBlockKeys / 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
    return quad_max(largest);
  }
  // Replaces the scores of row i by their powers. Returns this lane's part of the sum.
  __device__ __forceinline__ float exponentiate(int i, float scale) {
    float add[2];
#pragma unroll
    for (int j = 0; j < kBlockKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float power = s[j][2 * i + e] = exp2_approx(fmaf(s[j][2 * i + e], scale, -base[i]));
        add[e] = j == 0 ? power : add[e] + power;
      }
    return add[0] + add[1];
  }
  // Loads the rows' groups of columns [first, first + kGroups) of O into x.
  __device__ __forceinline__ void load_outputs(float4 (&x)[2][kGroups], const uint32_t (&at)[2], int first) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int m = 0; m < kGroups; ++m)
        if (exists[i]) x[i][m] = load_shared(output_group(at[i], first + m));
  }
  // Stores O' = add(O, o, i) for both rows i. x: the first kGroups groups of O, which are loaded already.
  template <class Add>
  __device__ __forceinline__ void add_outputs(float4 (&x)[2][kGroups], const uint32_t (&at)[2], Add add) const {
#pragma unroll
    for (int first = 0; first < kOutputGroups; first += kGroups) {
      if (first > 0) load_outputs(x, at, first);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int m = 0; m < kGroups; ++m) {
          const float(&low)[4] = o[2 * (first + m)], (&high)[4] = o[2 * (first + m) + 1];
          store_shared_if(exists[i], output_group(at[i], first + m),
                          make_float4(add(x[i][m].x, low[2 * i], i), add(x[i][m].y, low[2 * i + 1], i),
                                      add(x[i][m].z, high[2 * i], i), add(x[i][m].w, high[2 * i + 1], i)));
        }
    }
  }
};

// What a lane needs of an item before it computes it.
struct ItemOfLane {
  unsigned header;
  int first;          // the item's row with which those of the lane's warp begin
  int query_chunk;    // the row_chunk() of the row whose address the lane passes to ldmatrix: row lane % 16 of the warp
  int row_chunks[2];  // the row_chunk() of the lane's rows of a product
};

// Computes the items of warpgroup w. Every lane of a warp arrives at the barriers, not one lane: compute-sanitizer
// orders only the accesses of the lanes that arrive.
__device__ __forceinline__ void attend_items(const ResidentRowsArgs& a, const TokenTile& tile, Shared& shared, int w) {
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x % kWarpgroup / 32);
  w = uniform(w);
  const uint32_t queries = shared_address(shared.q);
  // Waits until item n is listed, and reads this lane's part.
  const auto read_item = [&](unsigned n) {
    ring_wait(shared.item_full, n);
    const Item& item = shared.items[n % kSlots];
    // A warp computes 16 of the item's 64 rows. If the item has fewer rows, some warps have none. Each of the SM's four
    // schedulers runs one warp of every warpgroup, so the rows are assigned to the warps in rotation, from item to
    // item: that gives the schedulers equal work.
    const int first = (warp + n + n / kWarpgroups) % 4 * 16, row = first + fragment_row();
    return ItemOfLane{item.header, first, item.chunks[first + lane % 16], {item.chunks[row], item.chunks[row + 8]}};
  };
  ItemOfLane next = read_item(w);
  barrier_wait(&shared.q_full, 0);
#pragma unroll 1
  for (unsigned n = w;; n += kWarpgroups) {
    const auto [count, arrivals, step, block] = ItemHeader::unpack(uniform(next.header));
    if (count == 0) return;
    const bool used = next.first < count;
    const uint32_t q = queries + 16 * (next.query_chunk ^ lane / 16);
    const int first_row = keep(next.first + fragment_row());
    Product product;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      product.rows[i] = row_of(next.row_chunks[i]), product.exists[i] = first_row + 8 * i < count;
    product.load_queries(q);
    const auto& kv = shared.stage[step % kStages];
    ring_wait(shared.kv_full, step);
    product.multiply_scores(tile_descriptor(shared_address(kv.k)));
    const int first_key = block * kBlockKeys;
    const auto keys_seen = [&](int(&seen)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) seen[i] = tile.first + a.heads.quotient(product.rows[i]) + 1 - first_key;
    };
    if (first_key + kBlockKeys > tile.first) {
      int seen[2];
      keys_seen(seen);
      product.mask(seen);
    }
    ring_wait(shared.base_set, step - 1);
    if (used) product.set_base(shared, a.scale_log2);
    barrier_arrive(&shared.base_set[step % kSlots], arrivals);
    if (used) {
      product.softmax(a.scale_log2);
      if (product.overflows()) {
        int seen[2];
        keys_seen(seen);
        product.softmax_again(q, kv.k, seen, a.scale_log2);
      }
    }
    product.begin_values(tile_descriptor(shared_address(kv.v)));
    next = read_item(n + kWarpgroups);  // while the tensor cores compute
    product.end_values();
    barrier_arrive(&shared.item_done[n % kSlots]);
    ring_wait(shared.merged, step - 1);
    if (used) product.merge(shared);
    barrier_arrive(&shared.merged[step % kSlots], arrivals);
  }
}

// Writes o and lse of the tile's rows and, if requested, the gated sum of the branches. A warp writes eight rows at a
// time, four lanes each.
__device__ __forceinline__ void store_rows(const ResidentRowsArgs& a, const TokenTile& tile, Shared& shared) {
  constexpr int kVectors = kHead / 32;  // 16-byte vectors of a lane
  const int lane = threadIdx.x % 32, c = lane % 4, G = a.heads.value(), rows = tile.tokens * G;
#pragma unroll 1
  for (int row0 = threadIdx.x / 32 * 8; row0 < rows; row0 += kConsumers / 4) {
    const int row = min(row0 + lane / 4, rows - 1), token = a.heads.quotient(row);
    const int t = tile.first + token, h = tile.g * G + row - token * G;
    const bool exists = row0 + lane / 4 < rows;
    const float2 sums = shared.sums[row];
    const float inverse = sums.y == 0.0f ? 0.0f : 1.0f / sums.y;
    uint4 columns[kVectors];
    const uint32_t at = output_address(shared, row);
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      const float4 x = load_shared(output_group(at, 2 * m)), y = load_shared(output_group(at, 2 * m + 1));
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

__global__ void __launch_bounds__(kCtaThreads, 1) fwd_resident_rows_kernel(const __grid_constant__ ResidentRowsArgs a) {
  auto& shared = *reinterpret_cast<Shared*>(aligned_shared());
  unsigned* const masks = block_masks(shared);
  const TokenTile tile(a);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    barrier_init(&shared.q_full, 1);
    for (unsigned i = 0; i < kSlots; ++i) {
      barrier_init(&shared.item_full[i], 32), barrier_init(&shared.kv_full[i], 1);
      barrier_init(&shared.item_done[i], kWarpgroup);
      barrier_init(&shared.base_set[i], kStepItems * kWarpgroup),
          barrier_init(&shared.merged[i], kStepItems * kWarpgroup);
    }
    barrier_init_done();
  }
  for (int i = threadIdx.x; i < tile.blocks() * kWords; i += kCtaThreads) masks[i] = 0;
  __syncthreads();
  if (threadIdx.x == kConsumers) load_queries(a, tile, shared);
  __syncwarp();
  read_lists(a, tile, masks);
  for (int i = threadIdx.x; i < kResidentRows * kHead / 4; i += kCtaThreads)
    reinterpret_cast<float4*>(shared.o)[i] = make_float4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < kResidentRows; i += kCtaThreads)
    shared.base[i] = -INFINITY, shared.sums[i] = make_float2(-INFINITY, 0.0f);
  __syncthreads();
  // Registers per thread: at the launch, the most that the launch bound allows, and then by role.
  constexpr int kRegisters = 65536 / kCtaThreads / 8 * 8, kRegistersProducer = 64, kRegistersConsumer = 104;
  static_assert(kRegistersProducer + kWarpgroups * kRegistersConsumer <= (kWarpgroups + 1) * kRegisters);
  if (warp >= kConsumers / 32) {
    decrease_registers<kRegistersProducer>();
    if (warp == kConsumers / 32)
      load_steps(a, tile, shared);
    else
      list_items(a, tile, shared, warp - kConsumers / 32 - 1);
  } else {
    increase_registers<kRegistersConsumer>();
    if (a.combine.active())
      for (int i = threadIdx.x; i < tile.tokens * a.heads.value(); i += kConsumers) {
        const int token = a.heads.quotient(i);
        a.combine.prefetch(tile.b, tile.first + token, tile.g * a.heads.value() + i - token * a.heads.value(), 0);
      }
    attend_items(a, tile, shared, warp / 4);
    named_barrier_sync<kConsumers>(1);  // after it, all items are merged
    store_rows(a, tile, shared);
    __syncwarp();
  }
}

}  // namespace

bool resident_rows_supports(const AttendOut& out, const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  constexpr int64_t kMostHeads = 8, kMostEntries = 64;  // no case has longer lists
  return forward_sm90_supports(out, in) && in.q.size(3) == 64 && in.q.size(2) / in.k.size(2) <= kMostHeads &&
         l_sel == kBlockKeys && block_index.size(3) <= kMostEntries && in.documents.empty() &&
         ceil_div(end_token(in), l_sel) <= kMostBlocks;
}

bool resident_rows_pays(const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  // Measured (tests/baselines/notes/selected.md). With more blocks for each list entry, few of a tile's tokens list a
  // block, and most rows of its items are copies. A tile has at most kResidentTokens tokens, so with one head they are,
  // too. With fewer blocks, the shared tile is faster if neighbouring tokens list nearly the same ones. The tokens of a
  // part of a row see on average as many blocks as those of a whole row of first_token + end_token tokens.
  const int64_t blocks = ceil_div(first_token(in) + end_token(in), l_sel), n = block_index.size(3);
  return in.q.size(2) / in.k.size(2) >= 2 && 8 * n <= blocks && blocks <= 16 * n;
}

void forward_resident_rows(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                           const SelectedKeys& keys, const CombineAlong* combine) {
  using bf16 = __nv_bfloat16;
  const int64_t B = in.k.size(0), groups = in.k.size(2), G = in.q.size(2) / groups;
  const int64_t tile_tokens = std::min<int64_t>(kResidentTokens, kResidentRows / G);
  const int64_t tiles = ceil_div(in.q.size(1), tile_tokens), all = B * groups * tiles;
  TRIAD_CHECK(all < (int64_t{1} << 31), "{}: {} tiles do not fit 31 bits", op, all);
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
  launch(ctx, op, fwd_resident_rows_kernel, dim3(static_cast<unsigned>(all)), dim3(kCtaThreads),
         shared_bytes(keys.lists.blocks), a);
}

}  // namespace triad::cuda
