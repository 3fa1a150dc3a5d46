// The selected branch's KV-stationary forward (nsa/sm90/kv_stationary.cu): kernel parameters, and the index kernels.
// These decide whether neighbouring tokens' lists differ enough, and sort each token range's list entries by block.
// nsa/gpu/inverse_index.cu explains why backward has a different index.
#pragma once
#include <algorithm>
#include <numbers>

#include "kernels/hopper/wgmma.cuh"
#include "kernels/nsa/gpu/attend.cuh"
#include "kernels/nsa/gpu/block_scan.cuh"
#include "kernels/nsa/sm90/kv_stationary_share.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileRows = 64;
constexpr int kPanelBytes = kTileRows * kPanelRowBytes;  // a panel: 64 columns for 64 rows or keys
constexpr int kItemTiles = 16;                           // row tiles per item, at most; a block may have several items
constexpr int kPartTokens = 1024;                        // tokens per CTA in the index kernels
constexpr int kIndexThreads = 1024;
constexpr float kLn2 = std::numbers::ln2_v<float>;

// How many near blocks a token has: the block that contains it, the block before that one, and its document's first
// block. With the default selection rule (1 initial and 2 local blocks) every token lists them, so neighbouring tokens
// share them. All other blocks in a list are far blocks: they are complete and precede the token. Results are correct
// for any number of near blocks; with this one, only far blocks differ between neighbours.
constexpr int kNear = 3;
// own: a token's block; first: its document's first block.
struct TokenBlocks {
  static constexpr int kNoFar = 1 << 30;  // a `first` for which no block is far
  int own, first;
  __device__ __forceinline__ bool is_far(int block) const { return block > first && block + 1 < own; }
};

// Arguments for the KV-stationary kernels. A step is a token range in one sequence and group; a launch computes several
// consecutive steps. An entry is a far block in one token's list. An item is one CTA's work: up to piece_tokens entries
// for one block.
struct KvStationaryArgs {
  View<const bf16> q, k, v;
  View<bf16> o;
  View<float> lse;
  BlockLists lists;
  Divisor n, heads, block_keys;
  float scale_log2;
  int range_tokens, ranges, steps, launch_steps;  // ranges: per sequence and group; steps: all groups' ranges, group
                                                  // after group; launch_steps: steps per launch
  int parts;                                      // parts (kPartTokens tokens each) per range
  int piece_tokens;                               // the most tokens per item
  KvStationaryShare share;                        // the tokens that these kernels compute
  int least_tokens;                               // the share has no documents with fewer tokens (packed rows)
  int near_tokens;                                // tokens per CTA in the near kernel
  int* near;  // [B*Hkv,lists.tokens] near blocks that the token lists: bit 0: its own, 1: the one before, 2: the first
              // one
  int* counts;       // [steps, parts, blocks] entry count; after plan_items, the first entry's index
  int* entries;      // [steps, entries_stride] sorted by block: the entry's token minus the range's first token
  int* entry_of;     // [steps, range_tokens, n] the entry's index for each place in a list; -1: no far block
  int* item_counts;  // item count per launch
  int4* items;       // [launches, items_stride] (block, first entry, entry count, step)
  int items_stride, entries_stride;
  bf16* partial;         // [launch_steps, entries_stride, G, dv] o's partial sums
  float2* partial_sums;  // row_max (x) and the sum of p (y) for the same rows, see RowSums
  __device__ __forceinline__ int first_token(int step) const {
    return lists.first_token + step % ranges * range_tokens;
  }
  __device__ __forceinline__ int tokens_of(int step) const {
    return min(range_tokens, lists.tokens - first_token(step));
  }
  // The first part, near_tokens tokens long, that the near kernel computes.
  __host__ __device__ __forceinline__ int first_near_part() const { return lists.first_token / near_tokens; }
  __device__ __forceinline__ int64_t first_row(int step) const {
    return static_cast<int64_t>(step % launch_steps) * entries_stride * heads.value();
  }
  // Whether the share has no tokens. Always false for packed rows, where this is decided for each document.
  __device__ __forceinline__ bool nothing_to_do() const { return !share.is_packed() && *share.all == 0; }
  __device__ __forceinline__ TokenBlocks blocks_of(const DocumentRow<int>& row, int t) const {
    const int first = row.first_block(t);
    return {first + block_keys.quotient(t - row.begin(t)), first};
  }
};

// ---- the index ----

// Returns `mine` summed over the threads before this one. total: the sum over all threads.
__device__ __forceinline__ int2 sum_before(int2 mine, int2& total) {
  return exclusive_scan<kIndexThreads>(mine, total, [](int2 a, int2 b) { return make_int2(a.x + b.x, a.y + b.y); });
}

// Calls f(token within the part, place in its list, block) for each list entry in a part's tokens.
template <class F>
__device__ __forceinline__ void for_entries(const KvStationaryArgs& a, int step, int first, int tokens, F&& f) {
  constexpr int kAtOnce = 8;
  const int bg = step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups, n = a.n.value();
  for (int e0 = threadIdx.x; e0 < tokens * n; e0 += kAtOnce * kIndexThreads) {
    int token[kAtOnce], place[kAtOnce], block[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int e = e0 + u * kIndexThreads;
      token[u] = a.n.quotient(e), place[u] = e - token[u] * n;
      block[u] = e < tokens * n ? __ldg(a.lists.at(b, first + token[u], g) + place[u]) : -1;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (e0 + u * kIndexThreads < tokens * n) f(token[u], place[u], block[u]);
  }
}
// A part of a step's token range, which one CTA in an index kernel processes. index: the part's number, counted over
// all steps. in_range, first: its first token, counted from the range's and the sequence's start. tokens: how many
// tokens it has.
struct Part {
  int step, b, in_range, first, tokens;
  __device__ __forceinline__ Part(const KvStationaryArgs& a, int index)
      : step(index / a.parts),
        b(step / a.ranges / a.lists.groups),
        in_range(index % a.parts * kPartTokens),
        first(a.first_token(step) + in_range),
        tokens(min(kPartTokens, a.tokens_of(step) - in_range)) {}
  // Writes TokenBlocks for the part's tokens to `to`, in shared memory. If !has_far(t), t has no far blocks.
  template <class HasFar>
  __device__ __forceinline__ void list_token_blocks(const KvStationaryArgs& a, const DocumentRow<int>& row,
                                                    TokenBlocks* to, HasFar&& has_far) const {
    static_assert(kPartTokens == kIndexThreads);
    const int token = threadIdx.x;
    if (token >= tokens) return;
    to[token] = a.blocks_of(row, first + token);
    if (!has_far(first + token)) to[token].first = TokenBlocks::kNoFar;
  }
};

// Compares the lists in the token tile that begins with t0. Returns this lane's part of two counts: how many blocks the
// tokens list (x), and how many without repetition (y). All the warp's lanes call it. The warp uses `seen`, in shared
// memory, which has one bit for each block in the row.
__device__ __forceinline__ int2 compare_tile(const KvStationaryArgs& a, int b, int g, int t0, unsigned* seen) {
  const int words = (a.lists.blocks + 31) / 32, lane = threadIdx.x % 32, n = a.n.value();
  const int count = min(a.share.tile_tokens, a.lists.tokens - t0) * n;
  for (int w = lane; w < words; w += 32) seen[w] = 0;
  __syncwarp();
  constexpr int kAtOnce = 8;
  int2 listed = {0, 0};
  for (int e0 = lane; e0 < count; e0 += 32 * kAtOnce) {
    int block[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int e = e0 + 32 * u, row = a.n.quotient(e);
      block[u] = e < count ? __ldg(a.lists.at(b, t0 + row, g) + e - row * n) : -1;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (block[u] < 0) continue;
      atomicOr(&seen[block[u] / 32], 1u << block[u] % 32);
      ++listed.x;
    }
  }
  __syncwarp();
  for (int w = lane; w < words; w += 32) listed.y += __popc(seen[w]);
  __syncwarp();
  return listed;
}

// Sets *share.all: whether neighbouring tokens' lists differ enough for the KV-stationary forward. They do if, on
// average over kComparedTiles tiles from all sequences, the union of a tile's lists has more than union_limit times one
// list's blocks. Counts are exact, so the same lists give the same decision.
constexpr int kComparedTiles = 64;
__device__ __forceinline__ void compare_rows(const KvStationaryArgs& a) {
  __shared__ int in_unions, in_lists;
  if (threadIdx.x == 0) in_unions = in_lists = 0;
  __syncthreads();
  const int warp = threadIdx.x / 32, words = (a.lists.blocks + 31) / 32;
  unsigned* const seen = reinterpret_cast<unsigned*>(dynamic_shared()) + warp * words;
  const int tiles = ceil_div(a.lists.tokens - a.lists.first_token, a.share.tile_tokens);  // tiles per sequence and
                                                                                          // group
  for (int i = warp; i < kComparedTiles; i += kIndexThreads / 32) {
    const int64_t tile = static_cast<int64_t>(tiles) * (a.steps / a.ranges) * i / kComparedTiles;
    const int bg = static_cast<int>(tile / tiles), b = bg / a.lists.groups, g = bg % a.lists.groups;
    const int t0 = a.lists.first_token + static_cast<int>(tile % tiles) * a.share.tile_tokens;
    const int2 listed = compare_tile(a, b, g, t0, seen);
    atomicAdd(&in_lists, listed.x);
    atomicAdd(&in_unions, listed.y);
  }
  __syncthreads();
  if (threadIdx.x == 0) *a.share.all = a.share.exceeds(in_lists, in_unions);
}

// Compares lists in one part of a packed row: adds kPartTiles tiles' counts to their documents' share.listed. It leaves
// out tiles that span several documents, and documents with fewer than least_tokens tokens.
constexpr int kPartTiles = 4;
__device__ __forceinline__ void compare_part(const KvStationaryArgs& a, const Part& part, const DocumentRow<int>& row) {
  const int warp = threadIdx.x / 32, t0 = part.first + warp * (kPartTokens / kPartTiles);
  const int end = t0 + a.share.tile_tokens;
  if (warp >= kPartTiles || end > part.first + part.tokens || end > row.end(t0) ||
      row.end(t0) - row.begin(t0) < a.least_tokens)
    return;
  unsigned* const seen = reinterpret_cast<unsigned*>(dynamic_shared()) + warp * ((a.lists.blocks + 31) / 32);
  const int2 listed = compare_tile(a, part.b, part.step / a.ranges % a.lists.groups, t0, seen);
  int2& sum = a.share.listed[int64_t{part.b} * a.share.documents.ids + row.first_block(t0)];
  atomicAdd(&sum.x, listed.x);
  atomicAdd(&sum.y, listed.y);
}

// Sets share.listed to zero, before the first index kernel adds to it.
__global__ void __launch_bounds__(kIndexThreads) kv_stationary_clear_kernel(int2* listed, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kIndexThreads + threadIdx.x;
  if (i < count) listed[i] = {0, 0};
}

// The first index kernel. CTA 0 compares lists, unless the rows are packed. Each other CTA counts, for one part, each
// block's far entries, and records which near blocks its tokens list. In packed rows it also compares its part's lists.
// read_lists_bytes is its dynamic shared memory size.
inline int64_t read_lists_bytes(int64_t blocks) {
  return std::max<int64_t>(kIndexThreads / 32 * ceil_div(blocks, 32), blocks) * static_cast<int64_t>(sizeof(int));
}
__global__ void __launch_bounds__(kIndexThreads)
    kv_stationary_read_lists_kernel(const __grid_constant__ KvStationaryArgs a) {
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i * a.launch_steps < a.steps; i += kIndexThreads) a.item_counts[i] = 0;
    if (!a.share.is_packed()) compare_rows(a);
    return;
  }
  __shared__ unsigned listed_near[kPartTokens];
  __shared__ TokenBlocks token_blocks[kPartTokens];
  int* const by_block = reinterpret_cast<int*>(dynamic_shared());  // each block's entry count
  const int index = blockIdx.x - 1;
  const Part part(a, index);
  const DocumentRow<int> row = a.share.documents.row(part.b);
  if (a.share.is_packed()) {
    compare_part(a, part, row);
    __syncthreads();  // by_block uses compare_part's memory
  }
  part.list_token_blocks(a, row, token_blocks,
                         [&](int t) { return !row.packed() || row.end(t) - row.begin(t) >= a.least_tokens; });
  for (int i = threadIdx.x; i < a.lists.blocks; i += kIndexThreads) by_block[i] = 0;
  for (int i = threadIdx.x; i < kPartTokens; i += kIndexThreads) listed_near[i] = 0;
  __syncthreads();
  for_entries(a, part.step, part.first, part.tokens, [&](int token, int, int block) {
    const TokenBlocks of = token_blocks[token];
    if (of.is_far(block))
      atomicAdd(&by_block[block], 1);
    else if (block >= 0 && block <= of.own)
      atomicOr(&listed_near[token], block == of.own ? 1u : block + 1 == of.own ? 2u : 4u);
  });
  __syncthreads();
  for (int i = threadIdx.x; i < a.lists.blocks; i += kIndexThreads)
    a.counts[static_cast<int64_t>(index) * a.lists.blocks + i] = by_block[i];
  int* const near = a.near + static_cast<int64_t>(part.step / a.ranges) * a.lists.tokens + part.first;
  for (int i = threadIdx.x; i < part.tokens; i += kIndexThreads) near[i] = static_cast<int>(listed_near[i]);
}

// The second index kernel: computes by prefix sums each block and part's first entry index, and cuts each block's
// entries into items. The items' order depends on the order in which the CTAs run; the results do not.
__global__ void __launch_bounds__(kIndexThreads)
    kv_stationary_plan_items_kernel(const __grid_constant__ KvStationaryArgs a) {
  __shared__ int first_item;
  if (a.nothing_to_do()) return;
  const int step = blockIdx.x, launch = step / a.launch_steps, b = step / a.ranges / a.lists.groups;
  const DocumentRow<int> row = a.share.documents.row(b);
  int* const counts = a.counts + static_cast<int64_t>(step) * a.parts * a.lists.blocks;
  int done = 0;
  for (int block0 = 0; block0 < a.lists.blocks; block0 += kIndexThreads) {
    const int block = block0 + threadIdx.x;
    const int begin_token = row.packed() && block < a.lists.blocks ? row.block_begin(block, 0) : 0;
    const bool exists = block < a.lists.blocks && begin_token < a.lists.tokens && a.share.has(b, begin_token);
    int entries = 0;
    for (int part = 0; exists && part < a.parts; ++part) entries += counts[part * a.lists.blocks + block];
    const int pieces = ceil_div(entries, a.piece_tokens);
    int2 total;
    const int2 at = sum_before({entries, pieces}, total);
    if (threadIdx.x == 0) first_item = atomicAdd(a.item_counts + launch, total.y);
    __syncthreads();
    for (int i = 0, first = 0; i < pieces; ++i, first += a.piece_tokens)
      a.items[static_cast<int64_t>(launch) * a.items_stride + first_item + at.y + i] =
          make_int4(block, done + at.x + first, min(a.piece_tokens, entries - first), step);
    int begin = done + at.x;
    for (int part = 0; exists && part < a.parts; ++part) {
      int& count = counts[part * a.lists.blocks + block];
      const int here = count;
      count = begin, begin += here;
    }
    done += total.x;
    __syncthreads();  // all threads have read first_item before it is overwritten
  }
}

// The third index kernel: writes the entries, sorted by block. Their order within a block and part is arbitrary: the
// merge kernel looks up each entry's partial sums and adds them in list order.
__global__ void __launch_bounds__(kIndexThreads)
    kv_stationary_fill_entries_kernel(const __grid_constant__ KvStationaryArgs a) {
  int* const by_block = reinterpret_cast<int*>(dynamic_shared());  // each block's next entry index
  __shared__ TokenBlocks token_blocks[kPartTokens];
  if (a.nothing_to_do()) return;
  const Part part(a, blockIdx.x);
  part.list_token_blocks(a, a.share.documents.row(part.b), token_blocks, [&](int t) { return a.share.has(part.b, t); });
  for (int i = threadIdx.x; i < a.lists.blocks; i += kIndexThreads)
    by_block[i] = a.counts[static_cast<int64_t>(blockIdx.x) * a.lists.blocks + i];
  __syncthreads();
  int* const out = a.entries + static_cast<int64_t>(part.step) * a.entries_stride;
  int* const entry_of = a.entry_of + static_cast<int64_t>(part.step) * a.entries_stride;
  for_entries(a, part.step, part.first, part.tokens, [&](int token, int place, int block) {
    const bool far = token_blocks[token].is_far(block);
    const int entry = far ? atomicAdd(&by_block[block], 1) : -1;
    if (far) out[entry] = part.in_range + token;
    entry_of[(part.in_range + token) * a.n.value() + place] = entry;
  });
}

}  // namespace
}  // namespace triad::cuda
