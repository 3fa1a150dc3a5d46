// The selected branch's forward on Hopper with a shared KV tile and a per-row mask: the plans for nsa/sm90/forward.cuh.
//
// A CTA's tokens share the union of their lists. A mask in shared memory has, for each block, a bit per token that
// lists it; the steps are the blocks with any bit set, in ascending order. Where a row's token doesn't list the block,
// scores are computed and masked. A warpgroup skips blocks that none of its own tokens lists. At T = 2048 and random
// lists, a 21-token tile computes about 1.35 times one list's blocks.
#pragma once
#include "kernels/nsa/sm90/forward.cuh"
#include "kernels/nsa/sm90/kv_stationary_share.cuh"

namespace triad::cuda {
namespace {

constexpr int kTileKeys = 64;  // keys per step

// The block lists for plans with any number of blocks whose masks fit into shared memory.
template <bool kPacked_>
struct SharedTileKeys {
  static constexpr bool kPacked = kPacked_;  // whether rows are packed
  KeyRange range;
  const int* data;
  int64_t batch, row, head;
  Divisor n, block_keys;
  int blocks, block_size;  // blocks: the most that a tile's plan has; block_size: l', the same as block_keys
  CombineRows combine;
  KvStationaryShare elsewhere;  // tokens whose results other kernels write afterwards
  int steps;                    // all blocks' steps
};
// most_blocks: see SharedTileKeys::blocks.
template <bool kPacked>
SharedTileKeys<kPacked> make_shared_tile_keys(const SelectedKeys& keys, int64_t most_blocks,
                                              const CombineAlong* combine, const KvStationaryShare* elsewhere) {
  const int blocks = static_cast<int>(most_blocks);
  return {keys.range,
          keys.lists.data,
          keys.lists.batch,
          keys.lists.row,
          keys.lists.head,
          Divisor(keys.lists.n),
          Divisor(keys.block_keys),
          blocks,
          keys.block_keys,
          combine_rows(combine, keys.lists.first_token),
          elsewhere == nullptr ? KvStationaryShare{} : *elsewhere,
          blocks * ceil_div(keys.block_keys, kTileKeys)};
}

template <bool kPacked, class Shape>
class Plan<SharedTileKeys<kPacked>, Shape> {
  using Keys = SharedTileKeys<kPacked>;

 public:
  static_assert(Shape::kKeys == kTileKeys);
  static constexpr bool kListed = true, kMadeTogether = true;
  static int64_t bytes(const Keys& keys) {
    const int64_t parts = ceil_div(keys.block_size, Shape::kKeys);
    return sizeof(Head) + sizeof(int) * keys.blocks * (kWords + parts + (kPacked ? 1 : 0));
  }
  static __device__ __forceinline__ bool nothing_to_do(const RowForwardArgs& a, const Keys& keys) {
    const CtaRows tile(a, static_cast<int>(blockIdx.x));
    return keys.elsewhere.has_all(tile.b, tile.first_token, tile.last_token);
  }
  __device__ __forceinline__ Plan(const RowForwardArgs& a, const Keys& keys, const CtaRows& tile, int w,
                                  unsigned char* memory)
      : keys_(keys), w_(w) {
    Head& head = *reinterpret_cast<Head*>(memory);
    unsigned* const masks = reinterpret_cast<unsigned*>(memory + sizeof(Head));
    unsigned* const entries = masks + keys.blocks * kWords;
    masks_ = masks, entries_ = entries;
    const DocumentRow<int> row = kPacked ? keys.range.documents.row(tile.b) : DocumentRow<int>{.T = a.in.tokens};
    // The blocks are counted from the first one that a token in the tile can list to the last token's own. If other
    // kernels compute the document with the tile's first token, its blocks are left out.
    const bool begins_elsewhere = kPacked && keys.elsewhere.has(tile.b, tile.first_token);
    const int block0 = row.first_block(begins_elsewhere ? row.end(tile.first_token) : tile.first_token);
    const int blocks = row.first_block(tile.last_token) - block0 +
                       keys.block_keys.quotient(tile.last_token - row.begin(tile.last_token)) + 1;
    for (int i = threadIdx.x; i < blocks * kWords; i += Shape::kThreads) masks[i] = 0;
    __syncthreads();
    const int* const lists = keys.data + tile.b * keys.batch + tile.first_token * keys.row + tile.g * keys.head;
    const int n = keys.n.value(), listed = (tile.last_token - tile.first_token + 1) * n;
    for (int i = threadIdx.x; i < listed; i += Shape::kThreads) {
      const int token = keys.n.quotient(i), block = lists[token * keys.row + i - token * n] - block0;
      if (0 <= block && block < blocks)  // -1 fills up a list's end
        atomicOr(&masks[block * kWords + token / 32], 1u << token % 32);
    }
    __syncthreads();
    if (threadIdx.x < 32) order_steps(a, tile, row, block0, blocks, head, masks, entries);
    __syncthreads();
    steps = head.steps, steps_seen = head.steps_seen[w];
  }
  __device__ __forceinline__ int first(int n) const {
    return block_begin(n) + static_cast<int>(entries_[n] >> kBlockBits & kMostParts) * Shape::kKeys;
  }
  __device__ __forceinline__ int end(int n) const { return block_begin(n) + keys_.block_size; }
  __device__ __forceinline__ bool sees(int n) const { return (entries_[n] >> kSeenShift >> w_ & 1) != 0; }
  __device__ __forceinline__ bool needs_mask(int n) const { return (entries_[n] >> kPartShift >> w_ & 1) != 0; }
  // Whether this CTA's token number `token` lists step n's block.
  __device__ __forceinline__ bool lists(int n, int token) const {
    return (masks_[block_of(n) * kWords + token / 32] >> token % 32 & 1) != 0;
  }

  // An entry describes a step in 32 bits: its block, counted from block0 (12 bits), the step's number in the block (12
  // bits), which warpgroups see any of its keys (4 bits), and which need a mask (4 bits).
  static constexpr int kBlockBits = 12, kMostParts = (1 << 12) - 1;
  int steps, steps_seen;

 private:
  static constexpr int kWords = Shape::kRowsCta / 32, kSeenShift = 24, kPartShift = 28;
  static_assert(Shape::kWarpgroups <= 4);
  struct Head {
    int steps, steps_seen[Shape::kWarpgroups];
  };

  __device__ __forceinline__ int block_of(int n) const { return entries_[n] & ((1 << kBlockBits) - 1); }
  // The first key in step n's block. In packed rows blocks begin anywhere: shared memory has a table of them.
  __device__ __forceinline__ int block_begin(int n) const {
    const int block = block_of(n);
    return kPacked ? static_cast<int>(entries_[keys_.steps + block]) : block * keys_.block_size;
  }

  // Writes the steps' entries in ascending key order. Called by one warp; each lane processes one of 32 blocks at a
  // time.
  __device__ __forceinline__ void order_steps(const RowForwardArgs& a, const CtaRows& tile, const DocumentRow<int>& row,
                                              int block0, int blocks, Head& head, const unsigned* masks,
                                              unsigned* entries) const {
    const int lane = threadIdx.x, block_keys = keys_.block_size;
    int count = 0, seen[Shape::kWarpgroups] = {};
    for (int first_block = 0; first_block < blocks; first_block += 32) {
      const int block = first_block + lane;
      const int begin = block < blocks ? row.block_begin(block0 + block, block_keys) : 0;
      unsigned seen_by = 0;
      int all_see[Shape::kWarpgroups] = {};  // all the warpgroup's rows see the keys in the block before this one
#pragma unroll
      for (int v = 0; v < Shape::kWarpgroups; ++v) {
        const int first_row = tile.first + 64 * v;
        if (block >= blocks || first_row >= tile.rows) continue;
        const int from = a.in.heads.quotient(first_row);
        const int to = a.in.heads.quotient(min(first_row + 64, tile.rows) - 1);
        all_see[v] = min(begin + block_keys, from + 1);
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          const int low = max(from - tile.first_token - 32 * i, 0), high = min(to - tile.first_token - 32 * i, 31);
          if (low <= high && (masks[block * kWords + i] >> low << (31 - high + low)) != 0) seen_by |= 1u << v;
        }
      }
      if (kPacked && block < blocks) entries[keys_.steps + block] = begin;
      const int end = min(begin + block_keys, tile.last_token + 1);
      const int parts = seen_by != 0 ? ceil_div(end - begin, Shape::kKeys) : 0;
      int at = parts;
      for (int by = 1; by < 32; by *= 2) {
        const int before = __shfl_up_sync(kFullWarp, at, by);
        if (lane >= by) at += before;
      }
      at += count;
      for (int i = 0; i < parts; ++i) {
        const int first = begin + i * Shape::kKeys;
        unsigned part_by = 0;
#pragma unroll
        for (int v = 0; v < Shape::kWarpgroups; ++v)
          part_by |= static_cast<unsigned>(first + Shape::kKeys > all_see[v]) << v;
        entries[at - parts + i] = part_by << kPartShift | seen_by << kSeenShift | i << kBlockBits | block;
      }
#pragma unroll
      for (int v = 0; v < Shape::kWarpgroups; ++v)
        seen[v] = max(seen[v], __reduce_max_sync(kFullWarp, (seen_by >> v & 1) != 0 ? at : 0));
      count = __shfl_sync(kFullWarp, at, 31);
    }
    if (lane != 0) return;
    head.steps = count;
#pragma unroll
    for (int v = 0; v < Shape::kWarpgroups; ++v) head.steps_seen[v] = seen[v];
  }

  const Keys& keys_;
  int w_;
  const unsigned *masks_, *entries_;
};

// The block lists for plans with up to 32 blocks of 64 or 128 keys: a list is then a 32-bit word. At T = 2048 and n =
// 16 nearly every block before a tile's own is listed by some of its tokens, so the steps are all key tiles up to the
// last token's. Nothing has to be ordered before the first load, and a row's mask is one bit. Each warp builds the plan
// by itself, so CTAs are persistent.
struct BitmapKeys {
  static constexpr bool kPacked = false;
  KeyRange range;
  const int* data;
  int64_t batch, row, head;
  int n, part_bits;  // each block has 1 << part_bits steps
  CombineRows combine;
};
inline BitmapKeys make_bitmap_keys(const SelectedKeys& keys, const CombineAlong* combine) {
  const BlockLists& lists = keys.lists;
  return {keys.range,
          lists.data,
          lists.batch,
          lists.row,
          lists.head,
          lists.n,
          keys.block_keys / 64 - 1,
          combine_rows(combine, keys.lists.first_token)};
}
inline bool lists_fit_bitmaps(const KeyRange& range, int block_keys) {
  return (block_keys == 64 || block_keys == 128) && range.keys <= 32 * block_keys;
}

// Each warp in a warpgroup holds the words for the warpgroup's tokens in its lanes, one or two tokens per lane. lists()
// reads them by shuffle, without shared memory or synchronization.
template <class Shape>
class Plan<BitmapKeys, Shape> {
 public:
  static constexpr bool kListed = true, kMadeTogether = false;
  static_assert(Shape::kKeys == 64);
  static int64_t bytes(const BitmapKeys&) { return 0; }
  static __device__ __forceinline__ bool nothing_to_do(const RowForwardArgs&, const BitmapKeys&) { return false; }
  __device__ __forceinline__ Plan(const RowForwardArgs& a, const BitmapKeys& keys, const CtaRows& tile, int w,
                                  unsigned char*)
      : steps(tile.last_token / Shape::kKeys + 1), keys_end_(keys.range.keys), part_bits_(keys.part_bits) {
    const int first_row = tile.first + 64 * w;
    if (first_row >= tile.rows) return;
    const int from = a.in.heads.quotient(first_row), to = a.in.heads.quotient(min(first_row + 64, tile.rows) - 1);
    all_see_ = from + 1, before_ = from - tile.first_token, many_ = to - from >= 32;
    const int* const lists = keys.data + tile.b * keys.batch + tile.g * keys.head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = from + 32 * i + static_cast<int>(threadIdx.x) % 32;
      if (token > to) break;
      const int* const list = lists + token * keys.row;
#pragma unroll 16
      for (int j = 0; j < keys.n; ++j) {
        const int block = __ldg(list + j);
        if (block >= 0) words_[i] |= 1u << block;  // -1 fills up a list's end
      }
    }
    // A list may contain blocks after the tile's last token; the plan has no steps for them.
    const unsigned reached = (2u << (steps - 1 >> part_bits_)) - 1;
    listed_ = __reduce_or_sync(kFullWarp, words_[0] | words_[1]) & reached;
    steps_seen = min(steps, 32 - __clz(listed_) << part_bits_);
  }
  __device__ __forceinline__ int first(int n) const { return n * Shape::kKeys; }
  __device__ __forceinline__ int end(int) const { return keys_end_; }
  __device__ __forceinline__ bool sees(int n) const { return (listed_ >> (n >> part_bits_) & 1) != 0; }
  __device__ __forceinline__ bool needs_mask(int n) const { return first(n) + Shape::kKeys > all_see_; }
  // Whether this CTA's token number `token` lists step n's block. All the warp's lanes must call it together.
  __device__ __forceinline__ bool lists(int n, int token) const {
    const int at = token - before_;
    unsigned word = __shfl_sync(kFullWarp, words_[0], at);
    if (many_) {
      const unsigned other = __shfl_sync(kFullWarp, words_[1], at);
      if (at >= 32) word = other;
    }
    return (word >> (n >> part_bits_) & 1) != 0;
  }

  int steps, steps_seen = 0;

 private:
  int keys_end_, part_bits_, all_see_ = 0, before_ = 0;
  bool many_ = false;                    // whether the warpgroup has more than 32 tokens
  unsigned words_[2] = {}, listed_ = 0;  // listed_: the blocks that any token in the warpgroup lists
};

}  // namespace
}  // namespace triad::cuda
