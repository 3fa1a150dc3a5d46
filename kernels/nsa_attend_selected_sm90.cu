// The selected branch on Hopper where neighbouring tokens list different blocks: seen from the blocks (bf16).
//
// A tile of rows that shares the union of its tokens' lists then multiplies mostly masked scores (KERNELS.md 4.2: 7
// times too many for ten tokens with random lists at T = 65536). Here a far block's keys and values lie in shared
// memory and the rows (t, h) of the tokens that list it are gathered, 64 a tile, for any G without waste: s = q k^T,
// softmax over this one block, o = p v. What a row gets from a block is a partial sum in slot (t, place in the list).
// Near blocks, which all neighbours list, are done for whole blocks of tokens; a row's o and lse hold their sums until
// its partial sums are merged with them, in the list's order.
//
// Partial sums of all tokens would be n * dv * 2 bytes a row: 1.6 GB at 65536 x 12 x 64. So the sequence goes in ranges
// of tokens, as many at once as kPartialBytes hold:
//   compare_lists        whether neighbours' lists differ enough for all this; if not, union tiles (or, where there
//                        are too many blocks for them, the tokens' side) do every block and the other kernels return
//                        at once
//   count_entries, plan_items, fill_entries   the entries (t, place) of each range by block, cut into items
//   near_kernel          a CTA has the tokens of a block and all their near blocks
//   gather_kernel        a CTA takes an item, a far block and up to 16 tiles of its entries
//   merge_kernel         dv / 8 lanes a row, its partial sums all on their way at once; combines, if asked for
//
// Random lists, n 16, l' 64, one H200, us:                  index   near   gather      merge
//   1 x 65536 x 12 x 2 x 64   1.27 ms (floor 0.25)         80+30   143    4 x 158     4 x 107
//   1 x 65536 x 64 x 4 x 128  12.2 ms (floor 2.7)         110+294  1017   44 x 152    44 x 107
// (+: union tiles that find nothing to do.) Merging reads at 3.6 TB/s. Gathering did not change with the number of
// instructions (-40%), of CTAs an SM (4 or 5), nor with the ranges' size (2048 to 16384 tokens): what bounds it is
// memory, 128 bytes of q read and as many of o written a row, 4.1 TB/s, the writes going on to device memory. Ranges
// whose partial sums stay in L2 are too short for launches: 2.0 ms with 72 MB, when the whole took 1.6.
#include "kernels/nsa_attend_selected_sm90.cuh"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/nsa_attend_selected_index_sm90.cuh"
#include "kernels/nsa_combine.cuh"

namespace triad::cuda {
namespace {

// ---- gathering ----

// A row of an item: where its q begins, in 16 bytes from the range's first, and its partial sum's row (-1: there is no
// such row; it repeats another).
struct ItemRow {
  int from, to;
};

// CTAs fill each other's waits: five of them gather on an SM (d = 64). kNear...: of the kernel for near blocks.
constexpr int kStages = 2;  // tiles of rows on their way
template <int kDk, int kDv>
struct FarShape {
  static constexpr int kCtas = kDk == 64 ? 5 : kDk == 128 ? 3 : 2;
  static constexpr int kNearGroups = kDk == 128 ? 3 : 2, kNearThreads = kNearGroups * kWarpgroup;
  static constexpr int kNearCtas = kDk == 64 ? 2 : 1;
  static constexpr int kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel;
  static constexpr int kStageBytes = kPanelsK * kPanelBytes, kKeyBytes = (kPanelsK + kPanelsV) * kPanelBytes;
  static constexpr int kTableBytes = kItemTiles * kTileRows * static_cast<int>(sizeof(ItemRow));
  static constexpr int shared_bytes(int key_tiles) {
    return kStages * kStageBytes + key_tiles * kKeyBytes + kTableBytes;
  }
  static constexpr int near_bytes(int key_tiles) {
    return kNearGroups * kStages * kStageBytes + kNear * key_tiles * kKeyBytes + kTableBytes;
  }
};

// The keys and values of a block: for every 64 of them the panels of k, then those of v. Past the block's end zeros.
template <int kDk, int kDv, int kThreads>
__device__ __forceinline__ void load_block(const FarArgs& a, int b, int g, int block, int key_tiles,
                                           unsigned char* to) {
  using Shape = FarShape<kDk, kDv>;
  const int block_keys = a.block_keys.value(), chunk = threadIdx.x % 8;
  for (int tile = 0; tile < key_tiles; ++tile, to += Shape::kKeyBytes)
#pragma unroll
    for (int r = threadIdx.x / 8; r < kTileRows; r += kThreads / 8) {
      const int key = tile * kTileRows + r, row = min(block * block_keys + key, a.lists.tokens - 1);
      const int bytes = key < block_keys && block * block_keys + key < a.lists.tokens ? 16 : 0;
      const bf16 *const k = a.k.at(b, row, g) + 8 * chunk, *const v = a.v.at(b, row, g) + 8 * chunk;
      unsigned char* const at = to + swizzled(r, chunk);
#pragma unroll
      for (int p = 0; p < Shape::kPanelsK; ++p) copy_async_16(at + p * kPanelBytes, k + p * kPanel, bytes);
#pragma unroll
      for (int p = 0; p < Shape::kPanelsV; ++p)
        copy_async_16(at + (Shape::kPanelsK + p) * kPanelBytes, v + p * kPanel, bytes);
    }
}

// One tile of rows against one tile of 64 keys after the other: o += p v, p relative to 2^top, and p's row sums
// before it is rounded for the product: sums of rounded ones, which the tensor cores can make (p times a tile of ones),
// put lse off by up to 1.3e-3.
template <int kDk, int kDv>
struct RowSums {
  static constexpr int kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel, kPanelUnits = kPanelBytes >> 4;
  float o[kPanelsV][8][4], sums[2] = {}, top[2];  // sums: of this lane's columns

  __device__ __forceinline__ RowSums() {
#pragma unroll
    for (int p = 0; p < kPanelsV; ++p) leave_unset(o[p]);
    top[0] = top[1] = -INFINITY;
  }
  // `add`: not the first tile of keys. seen[i]: the keys before it are seen by the lane's row i; all where kAll.
  template <bool kAll>
  __device__ __forceinline__ void attend(const uint32_t (&q)[kDk / 16][4], uint32_t k_tile, float scale, bool add,
                                         const int (&seen)[2]) {
    const uint32_t v_tile = k_tile + kPanelsK * kPanelUnits;
    float s[8][4];
    wgmma_fence();
    wgmma_first<0>(s, q[0], k_tile);
#pragma unroll
    for (int i = 1; i < kDk / 16; ++i) wgmma_add<0>(s, q[i], k_tile + i / 4 * kPanelUnits + 2 * (i % 4));
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    if (!kAll && min(seen[0], seen[1]) < kTileRows) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (8 * j + fragment_column() + e % 2 >= seen[e / 2]) s[j][e] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float best = s[0][2 * i];
#pragma unroll
      for (int j = 0; j < 8; ++j) best = fmaxf(best, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
      best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, 1));
      best = scale * fmaxf(best, __shfl_xor_sync(kFullWarp, best, 2));
      if (!kAll) {
        best = fmaxf(best, top[i]);
        if (add) {
          const float shrink = best == -INFINITY ? 1.0f : exp2_approx(top[i] - best);
          sums[i] *= shrink;
#pragma unroll
          for (int p = 0; p < kPanelsV; ++p)
#pragma unroll
            for (int j = 0; j < 8; ++j) o[p][j][2 * i] *= shrink, o[p][j][2 * i + 1] *= shrink;
        }
      }
      top[i] = best;
      const float minus = !kAll && best == -INFINITY ? 0.0f : -best;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) s[j][e] = exp2_approx(fmaf(s[j][e], scale, minus));
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[i] += s[j][2 * i] + s[j][2 * i + 1];
    }
    uint32_t left[kTileRows / 16][4];
#pragma unroll
    for (int i = 0; i < kTileRows / 16; ++i) pack_operand(left[i], s, i);
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < kPanelsV; ++p)
#pragma unroll
      for (int i = 0; i < kTileRows / 16; ++i)
        wgmma_across(o[p], left[i], v_tile + p * kPanelUnits + i * (16 * kPanelRowBytes >> 4), add || i > 0);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < kPanelsV; ++p) pin(o[p]);
  }

  // Of row i; every lane of the warp has to ask.
  __device__ __forceinline__ float total(int i) const {
    const float pair = sums[i] + __shfl_xor_sync(kFullWarp, sums[i], 1);
    return pair + __shfl_xor_sync(kFullWarp, pair, 2);
  }

  // Row i of this lane, times factor. A lane's eight columns of four 8 x 8 products, its pairs side by side, are 16
  // bytes: a quad writes 64 of a row at once. merge_kernel knows that order of columns.
  __device__ __forceinline__ void store(bf16* row, int i, float factor) const {
    uint4* const to = reinterpret_cast<uint4*>(row + threadIdx.x % 4 * 8);
#pragma unroll
    for (int p = 0; p < kPanelsV; ++p)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          pairs[j] = pack_bf16(o[p][4 * half + j][2 * i] * factor, o[p][4 * half + j][2 * i + 1] * factor);
        to[8 * p + 4 * half] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
  }
};

// A warp's 16 rows of a tile on their way: it brings them itself, two tiles ahead, and takes them to registers, where
// they are the products' left operand. So the warps meet only in the products.
template <int kDk>
struct RowLoads {
  static constexpr int kPanelsK = kDk / kPanel, kStageBytes = kPanelsK * kPanelBytes;
  unsigned char* stages;  // kStages of the warpgroup
  const ItemRow* rows;
  const bf16* q;  // the lane's chunk of the row at offset 0
  int warp_row, to_stage, from_stage;
  __device__ __forceinline__ RowLoads(unsigned char* stages, const ItemRow* rows, const bf16* q)
      : stages(stages), rows(rows), q(q + threadIdx.x % 8 * 8) {
    const int lane = threadIdx.x % 32;
    warp_row = threadIdx.x % kWarpgroup / 32 * 16;
    to_stage = swizzled(warp_row + lane / 8, lane % 8), from_stage = swizzled(warp_row + lane % 16, lane / 16);
  }
  // Every call is one group of copies.
  __device__ __forceinline__ void load(int tile, int stage, bool exists) const {
    if (exists) {
      unsigned char* const to = stages + stage * kStageBytes;
      const ItemRow* const of_lane = rows + tile * kTileRows + warp_row + threadIdx.x % 32 / 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bf16* const from = q + 8 * static_cast<int64_t>(of_lane[4 * i].from);
#pragma unroll
        for (int p = 0; p < kPanelsK; ++p)
          copy_async_16(to + p * kPanelBytes + (to_stage ^ (i % 2 * 4 << 4)) + i * 4 * kPanelRowBytes,
                        from + p * kPanel, 16);
      }
    }
    copy_async_commit();
  }
  // The oldest tile on its way is there.
  __device__ __forceinline__ void await() const {
    copy_async_wait_group<kStages - 1>();
    __syncwarp();
  }
  // A product's left operand. It is read anew for every product of a loop: where it stayed in registers around the
  // loop, ptxas 13.0 gave those to the loop's packed p too (seen in its SASS, and in wrong sums).
  __device__ __forceinline__ void take(uint32_t (&left)[kDk / 16][4], int stage) const {
    const unsigned char* const from = stages + stage * kStageBytes;
#pragma unroll
    for (int i = 0; i < kDk / 16; ++i)
      load_matrices(left[i],
                    reinterpret_cast<const bf16*>(from + i / 4 * kPanelBytes + (from_stage ^ (i % 4 * 2 << 4))));
  }
};

// kWhole: blocks of 64 keys.
template <int kDk, int kDv, bool kWhole>
__global__ void __launch_bounds__(kWarpgroup, FarShape<kDk, kDv>::kCtas - (kWhole ? 0 : 1))
    gather_kernel(const __grid_constant__ FarArgs a, int launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  using Shape = FarShape<kDk, kDv>;
  if (static_cast<int>(blockIdx.x) >= a.item_counts[launch]) return;
  const int4 item = a.items[static_cast<int64_t>(launch) * a.items_stride + blockIdx.x];
  const int block = item.x, count = item.z, step = item.w, G = a.heads.value();
  const int bg = step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups;
  const int key_tiles = kWhole ? 1 : (a.block_keys.value() + kTileRows - 1) / kTileRows;
  unsigned char *const stages = aligned_shared(), *const keys = stages + kStages * Shape::kStageBytes;
  ItemRow* const rows = reinterpret_cast<ItemRow*>(keys + key_tiles * Shape::kKeyBytes);
  load_block<kDk, kDv, kWarpgroup>(a, b, g, block, key_tiles, keys);
  copy_async_commit();

  const int n_rows = count * G, tiles = (n_rows + kTileRows - 1) / kTileRows;
  const int* const entries = a.entries + static_cast<int64_t>(step) * a.entries_stride + item.y;
  const int q_row = static_cast<int>(a.q.row / 8), q_head = static_cast<int>(a.q.head / 8);  // in 16 bytes
  for (int r = threadIdx.x; r < tiles * kTileRows; r += kWarpgroup) {
    const int row = min(r, n_rows - 1), e = a.heads.quotient(row), h = row - e * G, entry = __ldg(entries + e);
    const int t = entry >> 6;
    rows[r] = {t * q_row + h * q_head, r < n_rows ? (t * a.n.value() + (entry & 63)) * G + h : -1};
  }
  __syncthreads();
  const RowLoads<kDk> loads(stages, rows, a.q.at(b, a.first_token(step), g * G));
#pragma unroll
  for (int i = 0; i < kStages; ++i) loads.load(i, i, i < tiles);
  copy_async_wait_group<kStages>();
  fence_async_proxy();
  __syncthreads();  // keys and values are there

  const uint32_t k_tile = tile_descriptor(shared_address(keys));
  bf16* const partial = a.partial + a.first_row(step) * kDv;
  float2* const partial_sums = a.partial_sums + a.first_row(step);
  for (int tile = 0; tile < tiles; ++tile) {
    loads.await();
    RowSums<kDk, kDv> sums;
    for (int i = 0; i < key_tiles; ++i) {
      uint32_t q[kDk / 16][4];
      loads.take(q, tile % kStages);
      if (i == key_tiles - 1) {
        __syncwarp();
        loads.load(tile + kStages, tile % kStages, tile + kStages < tiles);
      }
      const int here = a.block_keys.value() - i * kTileRows;
      sums.template attend<kWhole>(q, k_tile + i * (Shape::kKeyBytes >> 4), a.scale_log2, i > 0, {here, here});
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int to = rows[tile * kTileRows + loads.warp_row + fragment_row() + 8 * i].to;
      const float total = sums.total(i);
      if (to < 0) continue;
      if (threadIdx.x % 4 == 0) partial_sums[to] = make_float2(sums.top[i], total);
      sums.store(partial + static_cast<int64_t>(to) * kDv, i, 1.0f);
    }
  }
#endif
}

// ---- near blocks ----

// A CTA has the tokens of one block, or some of them where G is large. They list the same near blocks, at most three,
// whose keys and values lie in shared memory.
template <int kDk, int kDv>
__global__ void __launch_bounds__(FarShape<kDk, kDv>::kNearThreads, FarShape<kDk, kDv>::kNearCtas)
    near_kernel(const __grid_constant__ FarArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = FarShape<kDk, kDv>;
  if (*a.differ == 0) return;
  const int G = a.heads.value(), block_keys = a.block_keys.value(), group = threadIdx.x / kWarpgroup;
  const int pieces = (block_keys + a.near_tokens - 1) / a.near_tokens;
  const int block = blockIdx.x / pieces, begin = block * block_keys, t0 = begin + blockIdx.x % pieces * a.near_tokens;
  const int b = blockIdx.y / a.lists.groups, g = blockIdx.y % a.lists.groups;
  const int count = min(min(a.near_tokens, begin + block_keys - t0), a.lists.tokens - t0);
  if (count <= 0) return;
  const int key_tiles = (block_keys + kTileRows - 1) / kTileRows, blocks = min(block + 1, kNear);
  unsigned char* const keys = aligned_shared();
  unsigned char* const stages = keys + kNear * key_tiles * Shape::kKeyBytes;
  ItemRow* const rows = reinterpret_cast<ItemRow*>(stages + Shape::kNearGroups * kStages * Shape::kStageBytes);
  // The token's own block, the one before it, the first one: bit i of a token's word says whether it lists them.
  for (int i = 0; i < blocks; ++i)
    load_block<kDk, kDv, Shape::kNearThreads>(a, b, g, i == 2 ? 0 : block - i, key_tiles,
                                              keys + i * key_tiles * Shape::kKeyBytes);
  copy_async_commit();
  const int n_rows = count * G, tiles = (n_rows + kTileRows - 1) / kTileRows;
  const int q_row = static_cast<int>(a.q.row / 8), q_head = static_cast<int>(a.q.head / 8);  // in 16 bytes
  const int* const near = a.near + static_cast<int64_t>(blockIdx.y) * a.lists.tokens + t0;
  for (int r = threadIdx.x; r < tiles * kTileRows; r += Shape::kNearThreads) {
    const int row = min(r, n_rows - 1), t = a.heads.quotient(row), h = row - t * G;
    rows[r] = {t * q_row + h * q_head, r < n_rows ? (t * G + h) << kNear | __ldg(near + t) : -1};
  }
  __syncthreads();
  const RowLoads<kDk> loads(stages + group * kStages * Shape::kStageBytes, rows, a.q.at(b, t0, g * G));
  constexpr int kGroups = Shape::kNearGroups;
#pragma unroll
  for (int i = 0; i < kStages; ++i) loads.load(group + i * kGroups, i, group + i * kGroups < tiles);
  copy_async_wait_group<kStages>();
  fence_async_proxy();
  __syncthreads();  // keys and values are there

  const uint32_t k_tile = tile_descriptor(shared_address(keys));
  for (int tile = group, turn = 0; tile < tiles; tile += kGroups, ++turn) {
    loads.await();
    int to[2], own[2];  // own: the keys that a row sees of its own block
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[i] = rows[tile * kTileRows + loads.warp_row + fragment_row() + 8 * i].to;
      own[i] = t0 - begin + a.heads.quotient(max(to[i], 0) >> kNear) + 1;
    }
    RowSums<kDk, kDv> sums;
#pragma unroll 1
    for (int i = 0; i < blocks * key_tiles; ++i) {
      uint32_t q[kDk / 16][4];
      loads.take(q, turn % kStages);
      if (i == blocks * key_tiles - 1) {
        __syncwarp();
        loads.load(tile + kStages * kGroups, turn % kStages, tile + kStages * kGroups < tiles);
      }
      const int which = key_tiles == 1 ? i : i / key_tiles, part = i - which * key_tiles;
      int seen[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        seen[j] = (to[j] >> which & 1) != 0 ? (which == 0 ? own[j] : block_keys) - part * kTileRows : 0;
      sums.template attend<false>(q, k_tile + i * (Shape::kKeyBytes >> 4), a.scale_log2, i > 0, seen);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = sums.total(i);
      if (to[i] < 0) continue;
      const int row = to[i] >> kNear, t = a.heads.quotient(row), h = g * G + row - t * G;
      sums.store(a.o.at(b, t0 + t, h), i, total == 0.0f ? 0.0f : __fdividef(1.0f, total));
      if (threadIdx.x % 4 == 0)
        *a.lse.at(b, t0 + t, h) = total == 0.0f ? -INFINITY : (sums.top[i] + __log2f(total)) * kLn2;
    }
  }
#endif
}

// ---- merging ----

// Four lanes have four words each; afterwards lane c has word c of each of them.
__device__ __forceinline__ void transpose(uint32_t (&w)[4]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int by = 1; by < 4; by *= 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t &low = w[by == 1 ? 2 * i : i], &high = w[by == 1 ? 2 * i + 1 : i + 2];
      const uint32_t got = __shfl_xor_sync(kFullWarp, (c & by) != 0 ? low : high, by);
      if ((c & by) != 0)
        low = got;
      else
        high = got;
    }
}

// A lane has 16 bytes of a row, in the order of columns of gather_kernel, kPlaces of its partial sums at once. Its
// row's lanes share out the looking up of lists and sums. (16 places at once and fewer CTAs were 5% slower, more CTAs
// of 48 registers 20%.)
constexpr int kMergeThreads = 128, kPlaces = 8;
template <int kDv>
__global__ void __launch_bounds__(kMergeThreads, 8)
    merge_kernel(const __grid_constant__ FarArgs a, const __grid_constant__ CombineRows combine, int first_step) {
  constexpr int kLanes = kDv / 8;
  static_assert(kPlaces <= kLanes);
  const bool merges = *a.differ != 0;  // else union tiles have stored o
  if (!merges && !combine.wanted()) return;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes * kLanes, G = a.heads.value();
  const int n = a.n.value(), step_rows = a.range_tokens * G;
  const int at = blockIdx.x * (kMergeThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
  const int step = min(first_step + at / step_rows, a.steps - 1), row = at % step_rows;
  const int t_in_range = min(a.heads.quotient(row), a.tokens_of(step) - 1), t = a.first_token(step) + t_in_range;
  const bool exists = first_step + at / step_rows == step && a.heads.quotient(row) == t_in_range;
  const int bg = step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups;
  const int in_group = row - a.heads.quotient(row) * G, h = g * G + in_group, current = a.block_keys.quotient(t);
  const int* const list = a.lists.at(b, t, g);
  const int64_t first = a.first_row(step) + static_cast<int64_t>(t_in_range) * n * G + in_group;

  float* const lse = a.lse.at(b, t, h);
  bf16* const o = a.o.at(b, t, h) + 8 * lane;
  const uint4 near = *reinterpret_cast<const uint4*>(o);
  float top = *lse * kLog2e, sum = top == -INFINITY ? 0.0f : 1.0f, out[8];
  for (int place0 = 0; merges && place0 < n; place0 += kPlaces) {
    const int place = place0 + lane;
    const bool is = lane < kPlaces && place < n && is_far(__ldg(list + place), current);
    // The power of 2 that a partial sum is relative to, and its probabilities' sum.
    const float2 sums =
        is ? __ldcs(a.partial_sums + first + static_cast<int64_t>(place) * G) : make_float2(-INFINITY, 0.0f);
    const unsigned far = __ballot_sync(kFullWarp, is) >> group;
    uint4 partial[kPlaces];
#pragma unroll
    for (int j = 0; j < kPlaces; ++j)
      partial[j] = (far >> j & 1) != 0
                       ? __ldcs(reinterpret_cast<const uint4*>(a.partial + (first + (place0 + j) * G) * kDv + 8 * lane))
                       : make_uint4(0, 0, 0, 0);
    float best = fmaxf(top, sums.x);
#pragma unroll
    for (int by = 1; by < kLanes; by *= 2) best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, by));
    const float base = best == -INFINITY ? 0.0f : best, shrink = exp2_approx(top - base);
    const float own_weight = exp2_approx(sums.x - base);
    float added = own_weight * sums.y;
#pragma unroll
    for (int by = 1; by < kLanes; by *= 2) added += __shfl_xor_sync(kFullWarp, added, by);
    top = best, sum = fmaf(sum, shrink, added);
    if (place0 == 0) {
      const uint32_t words[4] = {near.x, near.y, near.z, near.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        out[2 * i] = __uint_as_float(words[i] << 16), out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) out[c] *= shrink;
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      const float weight = __shfl_sync(kFullWarp, own_weight, j, kLanes);
      const uint32_t words[4] = {partial[j].x, partial[j].y, partial[j].z, partial[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), out[2 * i]);
        out[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000u), out[2 * i + 1]);
      }
    }
  }
  uint4 columns = near;
  if (merges) {
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_bf16(out[2 * i] * inverse, out[2 * i + 1] * inverse);
    transpose(words);
    columns = make_uint4(words[0], words[1], words[2], words[3]);
    if (exists) *reinterpret_cast<uint4*>(o) = columns;
    if (exists && lane == 0) *lse = sum == 0.0f ? -INFINITY : (top + log2f(sum)) * kLn2;
  }
  if (exists && combine.wanted()) {
    const CombineRows::Row row(combine, b, t, h, g);
    row.store(8 * lane, columns);
  }
}

// Ranges of so many tokens, and so many of them at once, that their partial sums take about kPartialBytes.
constexpr int64_t kPartialBytes = int64_t{416} << 20;
// Tables of all blocks lie in shared memory, and counts [T / 1024, blocks] of each (b, g) take half of q's memory then.
constexpr int kMaxBlocks = 16 * 1024;

// How many times a list is the union of the lists that the 64 rows of a union tile share, if far blocks are drawn at
// random from the middle of the sequence: KERNELS.md 4.2.
double random_union(int64_t tokens, int64_t block_keys, int64_t n, int64_t heads) {
  const double far = static_cast<double>(std::max<int64_t>(n - kNear, 0));
  const double blocks = std::max(static_cast<double>(tokens) / (2.0 * static_cast<double>(block_keys)), far + 1);
  const double in_union = blocks * (1 - std::pow(1 - far / blocks, std::max(64.0 / static_cast<double>(heads), 1.0)));
  return (kNear + in_union) / static_cast<double>(n);
}
// From which union on this route pays. On an H200, by this route and by union tiles of so many lists, ms:
//   1 x 65536 x 12 x 2 x 64: 1.28, 0.99 of 1.5, 4.7 of 6.9      1 x 65536 x 64 x 4 x 128: 12.2, 6.9 of 1.0, 25 of 3.2
//   4 x 8192 x 12 x 2 x 64:  0.62, 0.37 of 1.5, 0.92 of 3.8
double union_limit(int64_t dk) { return dk == 64 ? 2.2 : 1.7; }
// The lists are compared at all only where random ones would pass the limit clearly. At T = 8192 and 12 heads of 64
// they would by 1.7; but there a training step's lists make unions of about 2, and comparing them, after which eight
// kernels find nothing to do, costs 7% of the branch's forward.
constexpr double kWorthComparing = 1.8;

int range_tokens_of(int64_t tokens, int64_t token_bytes, int64_t groups) {
  const int64_t fit = kPartialBytes / token_bytes, most = std::max<int64_t>(fit / std::min<int64_t>(groups, 2), 128);
  const int64_t whole = most >= kPartTokens ? most / kPartTokens * kPartTokens : most / 128 * 128;
  return static_cast<int>(std::min({whole, tokens, int64_t{16} * kPartTokens}));
}

template <int kDk, int kDv>
void launch_far(Context& ctx, const char* op, const FarArgs& a, const CombineRows& combine, int64_t block_keys,
                int64_t G, int64_t blocks) {
  using Shape = FarShape<kDk, kDv>;
  const int key_tiles = static_cast<int>(ceil_div(block_keys, kTileRows));
  const int64_t merged = ceil_div(int64_t{a.launch_steps} * a.range_tokens * G, kMergeThreads / (kDv / 8));
  launch(ctx, op, near_kernel<kDk, kDv>,
         dim3(static_cast<unsigned>(blocks * ceil_div(block_keys, a.near_tokens)),
              static_cast<unsigned>(a.steps / a.ranges)),
         dim3(Shape::kNearThreads), Shape::near_bytes(key_tiles), a);
  for (int i = 0; i * a.launch_steps < a.steps; ++i) {
    launch(ctx, op, block_keys == kTileRows ? gather_kernel<kDk, kDv, true> : gather_kernel<kDk, kDv, false>,
           dim3(static_cast<unsigned>(a.items_stride)), dim3(kWarpgroup), Shape::shared_bytes(key_tiles), a, i);
    launch(ctx, op, merge_kernel<kDv>, dim3(static_cast<unsigned>(merged)), dim3(kMergeThreads), 0, a, combine,
           i * a.launch_steps);
  }
}
bool near_blocks_fit(int64_t dk, int64_t block_keys) {
  const int key_tiles = static_cast<int>(ceil_div(block_keys, kTileRows)), most = 226 * 1024;
  return (dk == 64    ? FarShape<64, 64>::near_bytes(key_tiles)
          : dk == 128 ? FarShape<128, 128>::near_bytes(key_tiles)
                      : FarShape<192, 128>::near_bytes(key_tiles)) <= most - 1024;
}

}  // namespace

bool attend_blocks_sm90_applies(const Context& ctx, const AttendOut& out, const AttendIn& in,
                                const ConstTensor& block_index, int64_t l_sel) {
  const auto far_rows = [](const ConstTensor& t) { return make_view<const bf16>(t).vector; };  // of 16-byte vectors
  const int64_t dk = in.q.size(3), dv = in.v.size(3), n = block_index.size(3);
  const bool widths = (dk == 64 && dv == 64) || (dk == 128 && dv == 128) || (dk == 192 && dv == 128);
  return ctx.compute_capability == 90 && in.q.dtype == DType::bf16 && widths && n <= 64 &&
         (l_sel == 32 || l_sel == 64 || l_sel == 128) && near_blocks_fit(dk, l_sel) &&
         in.q.size(2) / in.k.size(2) <= 64 && ceil_div(in.q.size(1), l_sel) <= kMaxBlocks && far_rows(in.q) &&
         far_rows(in.k) && far_rows(in.v) && far_rows(out.o) &&
         in.q.size(1) * in.q.stride[1] / 8 < (int64_t{1} << 31) &&
         random_union(in.q.size(1), l_sel, n, in.q.size(2) / in.k.size(2)) > kWorthComparing * union_limit(dk);
}

void attend_blocks_forward_sm90(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                                const ConstTensor& block_index, int64_t l_sel,
                                const std::function<void(const int* unless)>& attend_all, const CombineAlong* combine) {
  const int64_t T = in.q.size(1), bgs = in.k.size(0) * in.k.size(2), G = in.q.size(2) / in.k.size(2);
  const int64_t n = block_index.size(3), dv = in.v.size(3), blocks = ceil_div(T, l_sel);
  const int64_t token_bytes = n * G * (dv * 2 + 8);
  const int range_tokens = range_tokens_of(T, token_bytes, bgs);
  const int64_t ranges = ceil_div(T, range_tokens), steps = bgs * ranges, parts = ceil_div(range_tokens, kPartTokens);
  const int64_t launch_steps = std::clamp<int64_t>(kPartialBytes / (range_tokens * token_bytes), 1, steps);
  const int64_t launches = ceil_div(steps, launch_steps), entries = range_tokens * n;
  // Pieces of whole tiles: the last of a block alone is not full.
  const int64_t even = kTileRows / std::gcd(int64_t{kTileRows}, G), most = kItemTiles * kTileRows / G;
  const int64_t piece_tokens = std::max(most / even * even, std::min(even, most));
  const int64_t items = launch_steps * (std::min(blocks, entries) + entries / piece_tokens);
  Scratch::Scope scope(ctx.scratch);
  const auto ints = [&](int64_t count) { return scope.alloc(DType::i32, {count}).ptr<int32_t>(); };
  const FarArgs a{
      .q = make_view<const bf16>(in.q),
      .k = make_view<const bf16>(in.k),
      .v = make_view<const bf16>(in.v),
      .o = make_view<bf16>(out.o),
      .lse = make_view<float>(out.lse),
      .lists = {block_index.ptr<int32_t>(), block_index.stride[0], block_index.stride[1], block_index.stride[2],
                static_cast<int>(T), static_cast<int>(in.k.size(2)), static_cast<int>(blocks)},
      .n = Divisor(static_cast<int>(n)),
      .heads = Divisor(static_cast<int>(G)),
      .block_keys = Divisor(static_cast<int>(l_sel)),
      .scale_log2 = kLog2e / std::sqrt(static_cast<float>(in.q.size(3))),
      .range_tokens = range_tokens,
      .ranges = static_cast<int>(ranges),
      .steps = static_cast<int>(steps),
      .launch_steps = static_cast<int>(launch_steps),
      .parts = static_cast<int>(parts),
      .piece_tokens = static_cast<int>(piece_tokens),
      .tile_tokens = static_cast<int>(std::max<int64_t>(64 / G, 1)),
      .union_limit = static_cast<float>(union_limit(in.q.size(3))),
      .differ = ints(1),
      .near_tokens = static_cast<int>(std::min(l_sel, most)),
      .near = ints(bgs * T),
      .counts = ints(steps * parts * blocks),
      .entries = ints(steps * entries),
      .item_counts = ints(launches),
      .items = reinterpret_cast<int4*>(ints(4 * launches * items)),
      .items_stride = static_cast<int>(items),
      .entries_stride = static_cast<int>(entries),
      .partial = scope.alloc(DType::bf16, {launch_steps * entries * G, dv}).ptr<bf16>(),
      .partial_sums = reinterpret_cast<float2*>(scope.alloc(DType::f32, {launch_steps * entries * G, 2}).ptr<float>())};
  const dim3 all_parts(static_cast<unsigned>(steps * parts)), threads(kIndexThreads);
  const int64_t by_block = blocks * static_cast<int64_t>(sizeof(int));
  launch(ctx, "compare_lists", compare_lists_kernel, dim3(1), threads,
         kIndexThreads / 32 * ceil_div(blocks, 32) * sizeof(int), a);
  launch(ctx, "count_entries", count_entries_kernel, all_parts, threads, by_block, a);
  launch(ctx, "plan_items", plan_items_kernel, dim3(static_cast<unsigned>(steps)), threads, 0, a);
  launch(ctx, "fill_entries", fill_entries_kernel, all_parts, threads, by_block, a);
  attend_all(a.differ);
  if (in.q.size(3) == 64)
    launch_far<64, 64>(ctx, op, a, combine_rows(combine), l_sel, G, blocks);
  else if (in.q.size(3) == 128)
    launch_far<128, 128>(ctx, op, a, combine_rows(combine), l_sel, G, blocks);
  else
    launch_far<192, 128>(ctx, op, a, combine_rows(combine), l_sel, G, blocks);
}

}  // namespace triad::cuda
