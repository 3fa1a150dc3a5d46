// The selected branch's KV-stationary forward (nsa/sm90/kv_stationary.cu): the attention kernels. A CTA keeps blocks'
// keys and values in shared memory and computes the query rows for tokens that list them. For a far block these rows
// are gathered from the sequence; for near blocks they belong to consecutive tokens.
#pragma once
#include "kernels/nsa/gpu/fwd_dq.cuh"
#include "kernels/nsa/sm90/kv_stationary_index.cuh"

namespace triad::cuda {
namespace {

// Shared memory sizes, and CTAs per SM. ctas: the gather kernel's CTAs per SM; the six at d = 64 hide each other's
// latency. kNear... and near_bytes are for the near kernel.
constexpr int kStages = 2;  // row tiles in flight
template <int kDk, int kDv>
struct KvStationaryShape {
  static constexpr int kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel;
  static constexpr int kStageBytes = kPanelsK * kPanelBytes, kKeyBytes = (kPanelsK + kPanelsV) * kPanelBytes;
  static constexpr int kTableBytes = kItemTiles * kTileRows * static_cast<int>(sizeof(int));
  static constexpr int ctas(bool whole) {
    return kDk == 64 ? (whole ? 6 : 4) : kDk == 128 ? (whole ? 3 : 2) : (whole ? 2 : 1);
  }
  static constexpr int shared_bytes(int key_tiles) {
    return kStages * kStageBytes + key_tiles * kKeyBytes + kTableBytes;
  }
  static constexpr int kNearGroups = kDk == 128 ? 3 : 2, kNearThreads = kNearGroups * kWarpgroup;
  static constexpr int kNearCtas = kDk == 64 ? 2 : 1;
  static constexpr int near_bytes(int blocks, int key_tiles) {
    return kNearGroups * kStages * kStageBytes + blocks * key_tiles * kKeyBytes + 2 * kTableBytes;
  }
};

// Loads the keys and values in the block that begins at token `begin` into shared memory: for every 64 keys, k's panels
// and then v's. Keys past the row's end are set to zero.
template <int kDk, int kDv, int kThreads>
__device__ __forceinline__ void load_block(const KvStationaryArgs& a, int b, int g, int begin, int key_tiles,
                                           unsigned char* to) {
  using Shape = KvStationaryShape<kDk, kDv>;
  const int block_keys = a.block_keys.value(), chunk = threadIdx.x % 8;
  for (int tile = 0; tile < key_tiles; ++tile, to += Shape::kKeyBytes)
#pragma unroll
    for (int r = threadIdx.x / 8; r < kTileRows; r += kThreads / 8) {
      const int key = tile * kTileRows + r, row = min(begin + key, a.lists.tokens - 1);
      const int bytes = key < block_keys && begin + key < a.lists.tokens ? 16 : 0;
      const bf16 *const k = a.k.at(b, row, g) + 8 * chunk, *const v = a.v.at(b, row, g) + 8 * chunk;
      unsigned char* const at = to + swizzled(r, chunk);
#pragma unroll
      for (int p = 0; p < Shape::kPanelsK; ++p) copy_async_16(at + p * kPanelBytes, k + p * kPanel, bytes);
#pragma unroll
      for (int p = 0; p < Shape::kPanelsV; ++p)
        copy_async_16(at + (Shape::kPanelsK + p) * kPanelBytes, v + p * kPanel, bytes);
    }
}

// One row tile's running softmax over 64-key tiles: o += p v, with p = 2^(score - row_max), and p's row sums. The sums
// add p in fp32: the tensor cores could multiply p by ones instead, but they read p rounded to bf16, and the lse would
// be less accurate.
template <int kDk, int kDv>
struct RowSums {
  static constexpr int kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel, kPanelUnits = kPanelBytes >> 4;
  float o[kPanelsV][8][4], sums[2] = {}, row_max[2];  // sums: this lane's share of p's row sums

  __device__ __forceinline__ RowSums() {
#pragma unroll
    for (int p = 0; p < kPanelsV; ++p) leave_unset(o[p]);
    row_max[0] = row_max[1] = -INFINITY;
  }
  // Adds one key tile to the sums. The lane's row i (0 or 1) sees seen[i] keys. kAll: all rows see all keys, and this
  // is the only tile. add: this is not the first tile. last: this is the last tile; after it, sums[i] covers all
  // columns. meanwhile() runs during the first product.
  template <bool kAll, class Meanwhile>
  __device__ __forceinline__ void attend(const uint32_t (&q)[kDk / 16][4], uint32_t k_tile, float scale,
                                         const int (&seen)[2], bool add, bool last, Meanwhile&& meanwhile) {
    const uint32_t v_tile = k_tile + kPanelsK * kPanelUnits;
    float s[8][4];
    wgmma_fence();
    wgmma_begin<Major::k>(s, q[0], k_tile);
#pragma unroll
    for (int i = 1; i < kDk / 16; ++i) wgmma<Major::k>(s, q[i], k_tile + i / 4 * kPanelUnits + 2 * (i % 4));
    wgmma_commit();
    meanwhile();
    wgmma_wait<0>();
    pin(s);
    if (!kAll && min(seen[0], seen[1]) < kTileRows) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (8 * j + fragment_column() + e % 2 >= seen[e / 2]) s[j][e] = -INFINITY;
    }
    float largest[2] = {s[0][0], s[0][2]};
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) largest[i] = fmaxf(largest[i], fmaxf(s[j][2 * i], s[j][2 * i + 1]));
#pragma unroll
    for (int by = 1; by < 4; by *= 2)
#pragma unroll
      for (int i = 0; i < 2; ++i) largest[i] = fmaxf(largest[i], __shfl_xor_sync(kFullWarp, largest[i], by));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float best = scale * largest[i];
      if (!kAll && add) {
        best = fmaxf(best, row_max[i]);
        const float rescale = best == -INFINITY ? 1.0f : exp2_approx(row_max[i] - best);
        sums[i] *= rescale;
#pragma unroll
        for (int p = 0; p < kPanelsV; ++p)
#pragma unroll
          for (int j = 0; j < 8; ++j) o[p][j][2 * i] *= rescale, o[p][j][2 * i + 1] *= rescale;
      }
      row_max[i] = best;
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
        wgmma<Major::mn>(o[p], left[i], v_tile + p * kPanelUnits + i * (16 * kPanelRowBytes >> 4), add || i > 0);
    wgmma_commit();
    if (last) sums[0] = quad_sum(sums[0]), sums[1] = quad_sum(sums[1]);
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < kPanelsV; ++p) pin(o[p]);
  }

  // Stores this lane's row i, multiplied by factor. A lane's columns in four neighbouring 8 x 8 products, eight in all,
  // are stored as 16 contiguous bytes; a lane quad then writes 64 bytes of a row at once. The columns are permuted by
  // this; the merge kernel restores their order. The stores have an evict-first hint, so that q stays in L2.
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
        __stcs(to + 8 * p + 4 * half, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      }
  }
};

// Loads a warp's 16 rows in each tile, two tiles ahead, and reads them into registers as the left operand. Each warp
// loads its own rows, so that warps synchronize only within wgmma.
template <int kDk>
struct RowLoads {
  static constexpr int kPanelsK = kDk / kPanel, kStageBytes = kPanelsK * kPanelBytes;
  unsigned char* stages;  // the warpgroup's ring of row tiles, [kStages]
  const int* rows;  // the warp's row offsets from q in units of 16 bytes: tile i's 16 begin at rows[i * tile_rows]
  const bf16* q;    // this lane's 16 bytes in the row at offset 0
  int tile_rows, warp_row, to_stage, from_stage;
  __device__ __forceinline__ RowLoads(unsigned char* stages, const int* rows, int tile_rows, const bf16* q)
      : stages(stages), rows(rows), q(q + threadIdx.x % 8 * 8), tile_rows(tile_rows) {
    const int lane = threadIdx.x % 32;
    warp_row = threadIdx.x % kWarpgroup / 32 * 16;
    to_stage = swizzled(warp_row + lane / 8 * 4, lane % 8), from_stage = swizzled(warp_row + lane % 16, lane / 16);
  }
  // Starts a tile's loads. Lanes 8 i .. 8 i + 7 load rows 4 i .. 4 i + 3. Every call commits one cp.async group, even
  // if the tile does not exist.
  __device__ __forceinline__ void load(int tile, int stage, bool exists) const {
    if (exists) {
      unsigned char* const to = stages + stage * kStageBytes;
      const int4 lane_offsets = *reinterpret_cast<const int4*>(rows + tile * tile_rows + threadIdx.x % 32 / 8 * 4);
      const int from_row[4] = {lane_offsets.x, lane_offsets.y, lane_offsets.z, lane_offsets.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bf16* const from = q + 8 * static_cast<int64_t>(from_row[i]);
#pragma unroll
        for (int p = 0; p < kPanelsK; ++p)
          copy_async_16(to + p * kPanelBytes + (to_stage ^ i << 4) + i * kPanelRowBytes, from + p * kPanel, 16);
      }
    }
    copy_async_commit();
  }
  // Waits until the oldest tile in flight has arrived.
  __device__ __forceinline__ void await() const {
    copy_async_wait_group<kStages - 1>();
    __syncwarp();
  }
  // Reads a product's left operand from shared memory. It is read again for every product in a loop: when it stayed in
  // registers around the loop, ptxas 13.0 assigned the same registers to p, which the loop packs, and the sums were
  // wrong.
  __device__ __forceinline__ void take(uint32_t (&left)[kDk / 16][4], int stage) const {
    const unsigned char* const from = stages + stage * kStageBytes;
#pragma unroll
    for (int i = 0; i < kDk / 16; ++i)
      load_matrices(left[i],
                    reinterpret_cast<const bf16*>(from + i / 4 * kPanelBytes + (from_stage ^ (i % 4 * 2 << 4))));
  }
};

// The gather kernel: a CTA computes one item. kWhole: all blocks have 64 keys.
template <int kDk, int kDv, bool kWhole>
__global__ void __launch_bounds__(kWarpgroup, KvStationaryShape<kDk, kDv>::ctas(kWhole))
    fwd_kv_stationary_gather_kernel(const __grid_constant__ KvStationaryArgs a, int launch) {
  using Shape = KvStationaryShape<kDk, kDv>;
  if (static_cast<int>(blockIdx.x) >= a.item_counts[launch]) return;
  const int4 item = a.items[static_cast<int64_t>(launch) * a.items_stride + blockIdx.x];
  const int block = item.x, count = item.z, step = item.w, G = a.heads.value();
  const int bg = step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups;
  const int key_tiles = kWhole ? 1 : ceil_div(a.block_keys.value(), kTileRows);
  unsigned char *const stages = aligned_shared(), *const keys = stages + kStages * Shape::kStageBytes;
  const int n_rows = count * G, tiles = ceil_div(n_rows, kTileRows);
  // Each warp computes the offsets for its own 16 rows in every tile. The first two tiles' offsets are computed first,
  // so that their loads start early. The rows past the last one repeat it.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int* const rows = reinterpret_cast<int*>(keys + key_tiles * Shape::kKeyBytes) + warp * (kItemTiles * 16);
  const int* const entries = a.entries + static_cast<int64_t>(step) * a.entries_stride + item.y;
  // q's strides in units of 16 bytes
  const int q_row = static_cast<int>(a.q.row / 8), q_head = static_cast<int>(a.q.head / 8);
  const auto row_of = [&](int i) { return min(i / 16 * kTileRows + warp * 16 + i % 16, n_rows - 1); };
  const auto token_at = [&](int i) { return __ldg(entries + a.heads.quotient(row_of(i))); };
  const auto place = [&](int i, int token) {
    const int row = row_of(i), h = row - a.heads.quotient(row) * G;
    rows[i] = token * q_row + h * q_head;
  };
  const int first_token = token_at(lane);
  load_block<kDk, kDv, kWarpgroup>(a, b, g, a.share.documents.row(b).block_begin(block, a.block_keys.value()),
                                   key_tiles, keys);
  copy_async_commit();
  place(lane, first_token);
  __syncwarp();
  const RowLoads<kDk> loads(stages, rows, 16, a.q.at(b, a.first_token(step), g * G));
#pragma unroll
  for (int i = 0; i < kStages; ++i) loads.load(i, i, i < tiles);
#pragma unroll 4
  for (int i = kStages * 16 + lane; i < tiles * 16; i += 32) place(i, token_at(i));
  copy_async_wait_group<kStages>();
  fence_async_proxy();
  __syncthreads();  // now the keys and values are in shared memory

  const uint32_t k_tile = tile_descriptor(shared_address(keys));
  const int64_t first_row = a.first_row(step) + static_cast<int64_t>(item.y) * G;
  bf16* const partial = a.partial + first_row * kDv;
  float2* const partial_sums = a.partial_sums + first_row;
  for (int tile = 0; tile < tiles; ++tile) {
    loads.await();
    RowSums<kDk, kDv> sums;
    for (int i = 0; i < key_tiles; ++i) {
      uint32_t q[kDk / 16][4];
      loads.take(q, tile % kStages);
      const int here = a.block_keys.value() - i * kTileRows;
      const bool last = i == key_tiles - 1;
      sums.template attend<kWhole>(q, k_tile + i * (Shape::kKeyBytes >> 4), a.scale_log2, {here, here}, i > 0, last,
                                   [&] {
                                     if (!last) return;
                                     __syncwarp();  // now all lanes have read the tile's rows
                                     loads.load(tile + kStages, tile % kStages, tile + kStages < tiles);
                                   });
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile * kTileRows + loads.warp_row + fragment_row() + 8 * i;
      if (row >= n_rows) continue;
      if (threadIdx.x % 4 == 0) partial_sums[row] = make_float2(sums.row_max[i], sums.sums[i]);
      sums.store(partial + static_cast<int64_t>(row) * kDv, i, 1.0f);
    }
  }
}

// ---- near blocks ----

// The tokens that a CTA in the near kernel computes, and their near blocks. The tokens are consecutive, at most
// near_tokens: a part of a block, a block, or two blocks. The two blocks may belong to different documents; a block
// whose tokens are not in the share is left out, and so are tokens before the call's first query. Shared memory has at
// most four near blocks, in this order: `count` consecutive blocks, which end with the last token's own block; then the
// document's first block, if it isn't one of these. A block's index in this order is its place.
struct NearBlocks {
  int t0, tokens;       // the tokens [t0, t0 + tokens); if `tokens` is not positive, the other members are not set
  int first, count;     // the consecutive blocks [first, first + count)
  int first_begin;      // block `first`'s first token
  int last_begin;       // the last consecutive block's first token
  int document_begin;   // the first token in t0's document
  bool begins_earlier;  // whether the document begins before block `first`
  // part: counts near_tokens tokens per part and block_keys tokens per block id. In packed rows this runs ahead of the
  // tokens' positions, because a document's last block may be short.
  __device__ __forceinline__ NearBlocks(const KvStationaryArgs& a, const DocumentRow<int>& row, int b, int part) {
    const int block_keys = a.block_keys.value(), ids = a.lists.blocks;
    const int id = a.block_keys.quotient(part * a.near_tokens), offset = part * a.near_tokens - id * block_keys;
    const auto begin_of = [&](int block) { return block < ids ? row.block_begin(block, block_keys) : a.lists.tokens; };
    const auto in_share = [&](int begin) { return begin < a.lists.tokens && a.share.has(b, begin); };
    const int begin = begin_of(id), next_begin = a.near_tokens > block_keys ? begin_of(id + 1) : a.lists.tokens;
    const bool has = in_share(begin), has_next = in_share(next_begin);
    const int end = has ? min(row.block_end(id, block_keys), begin + offset + a.near_tokens) : 0;
    t0 = max(has ? begin + offset : next_begin, a.lists.first_token);
    tokens = (has_next ? row.block_end(id + 1, block_keys) : end) - t0;
    if (tokens <= 0) return;
    const int document_block = row.first_block(t0);
    first = max((has ? id : id + 1) - 1, document_block), count = (has_next ? id + 1 : id) - first + 1;
    first_begin = row.block_begin(first, block_keys), last_begin = has_next ? next_begin : begin;
    document_begin = row.begin(t0), begins_earlier = first > document_block;
  }
  __device__ __forceinline__ int all() const { return count + begins_earlier; }  // blocks in shared memory
  // The first token in the block at this place.
  __device__ __forceinline__ int begin_of(int place, int block_keys) const {
    return place >= count ? document_begin : place == count - 1 ? last_begin : first_begin + place * block_keys;
  }
  // Returns which blocks in shared memory a token lists, as a mask by place. near: the token's value in
  // KvStationaryArgs::near. own: where the token's own block is.
  __device__ __forceinline__ int listed(int near, int own) const {
    const int own_and_before = own > 0 ? (near & 1) << own | (near >> 1 & 1) << (own - 1) : near;
    return own_and_before | (near >> 2) << (begins_earlier ? count : 0);
  }
};

// The near kernel: a CTA computes the tokens in NearBlocks, and its warpgroups alternate row tiles. Grid: x the tokens,
// y the sequence and group.
template <int kDk, int kDv>
__global__ void __launch_bounds__(KvStationaryShape<kDk, kDv>::kNearThreads, KvStationaryShape<kDk, kDv>::kNearCtas)
    fwd_kv_stationary_near_kernel(const __grid_constant__ KvStationaryArgs a) {
  using Shape = KvStationaryShape<kDk, kDv>;
  constexpr int kGroups = Shape::kNearGroups, kListedBits = 4;
  if (a.nothing_to_do()) return;
  const int G = a.heads.value(), block_keys = a.block_keys.value(), group = threadIdx.x / kWarpgroup;
  const int b = blockIdx.y / a.lists.groups, g = blockIdx.y % a.lists.groups;
  const int key_tiles = ceil_div(block_keys, kTileRows);
  const NearBlocks blocks(a, a.share.documents.row(b), b, a.first_near_part() + static_cast<int>(blockIdx.x));
  const int t0 = blocks.t0, count = blocks.tokens, own_last = blocks.count - 1;
  if (count <= 0) return;
  __shared__ int begins[4];  // first tokens of the blocks in shared memory
  if (static_cast<int>(threadIdx.x) < blocks.all()) begins[threadIdx.x] = blocks.begin_of(threadIdx.x, block_keys);
  __syncthreads();
  // The place of the block that contains token t, one of the CTA's.
  const auto place_of = [&](int t) { return t >= begins[own_last] ? own_last : own_last - 1; };
  unsigned char* const keys = aligned_shared();
  unsigned char* const stages = keys + blocks.all() * key_tiles * Shape::kKeyBytes;
  int* const rows = reinterpret_cast<int*>(stages + kGroups * kStages * Shape::kStageBytes);
  int* const outs = rows + kItemTiles * kTileRows;  // each row's position (t - t0, h) and near block mask; -1: the row
                                                    // doesn't exist
  for (int i = 0; i < blocks.all(); ++i)
    load_block<kDk, kDv, Shape::kNearThreads>(a, b, g, begins[i], key_tiles, keys + i * key_tiles * Shape::kKeyBytes);
  copy_async_commit();
  const int n_rows = count * G, tiles = ceil_div(n_rows, kTileRows);
  // q's strides in units of 16 bytes
  const int q_row = static_cast<int>(a.q.row / 8), q_head = static_cast<int>(a.q.head / 8);
  const int* const near = a.near + static_cast<int64_t>(blockIdx.y) * a.lists.tokens + t0;
  for (int r = threadIdx.x; r < tiles * kTileRows; r += Shape::kNearThreads) {
    const int row = min(r, n_rows - 1), t = a.heads.quotient(row), h = row - t * G;
    rows[r] = t * q_row + h * q_head;
    outs[r] = r < n_rows ? row << kListedBits | blocks.listed(__ldg(near + t), place_of(t0 + t)) : -1;
  }
  __syncthreads();
  const RowLoads<kDk> loads(stages + group * kStages * Shape::kStageBytes, rows + threadIdx.x % kWarpgroup / 32 * 16,
                            kTileRows, a.q.at(b, t0, g * G));
#pragma unroll
  for (int i = 0; i < kStages; ++i) loads.load(group + i * kGroups, i, group + i * kGroups < tiles);
  copy_async_wait_group<kStages>();
  fence_async_proxy();
  __syncthreads();  // now the keys and values are in shared memory

  const uint32_t k_tile = tile_descriptor(shared_address(keys));
  for (int tile = group, turn = 0; tile < tiles; tile += kGroups, ++turn) {
    loads.await();
    int to[2], own[2];  // the row's value in outs (to), and its token (own)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[i] = outs[tile * kTileRows + loads.warp_row + fragment_row() + 8 * i];
      own[i] = t0 + a.heads.quotient(max(to[i], 0) >> kListedBits);
    }
    // This tile's tokens list only blocks at the places [from, end), and the one at place `count`, if it exists.
    const int last_row = min(tile * kTileRows + kTileRows, n_rows) - 1;
    const int from = blocks.begins_earlier ? max(place_of(t0 + a.heads.quotient(tile * kTileRows)) - 1, 0) : 0;
    const int end = place_of(t0 + a.heads.quotient(last_row)) + 1;
    RowSums<kDk, kDv> sums;
    bool add = false;
#pragma unroll 1
    for (int i = from * key_tiles; i < blocks.all() * key_tiles; ++i) {
      if (i == end * key_tiles) i = blocks.count * key_tiles;
      if (i >= blocks.all() * key_tiles) break;
      const int which = key_tiles == 1 ? i : i / key_tiles, part = i - which * key_tiles;
      uint32_t q[kDk / 16][4];
      loads.take(q, turn % kStages);
      int seen[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        seen[j] = (to[j] >> which & 1) == 0 ? 0 : min(block_keys, own[j] + 1 - begins[which]) - part * kTileRows;
      sums.template attend<false>(q, k_tile + i * (Shape::kKeyBytes >> 4), a.scale_log2, seen, add, false, [] {});
      add = true;
    }
    __syncwarp();  // now all lanes have read the tile's rows
    loads.load(tile + kStages * kGroups, turn % kStages, tile + kStages * kGroups < tiles);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = quad_sum(sums.sums[i]);
      if (to[i] < 0) continue;
      const int row = to[i] >> kListedBits, t = a.heads.quotient(row), h = g * G + row - t * G;
      sums.store(a.o.at(b, t0 + t, h), i, total == 0.0f ? 0.0f : __fdividef(1.0f, total));
      if (threadIdx.x % 4 == 0)
        *a.lse.at(b, t0 + t, h) = total == 0.0f ? -INFINITY : (sums.row_max[i] + __log2f(total)) * kLn2;
    }
  }
}

}  // namespace
}  // namespace triad::cuda
