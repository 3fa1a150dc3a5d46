// KV-stationary forward of the selected branch (nsa/sm90/kv_stationary.cu): the parameters of its kernels, and the
// index kernels. These decide whether the lists differ enough, and sort the list entries of each range of tokens by
// block. nsa/gpu/inverse_index.cu, the index of backward, says why the two are not one.
#pragma once
#include <algorithm>
#include <numbers>

#include "kernels/hopper/wgmma.cuh"
#include "kernels/nsa/gpu/attend.cuh"
#include "kernels/nsa/gpu/block_scan.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileRows = 64;
constexpr int kPanelBytes = kTileRows * kPanelRowBytes;  // a panel: 64 columns of 64 rows or keys
constexpr int kItemTiles = 16;                           // tiles per item, at most; blocks with more are split
constexpr int kPartTokens = 1024;                        // tokens per CTA of the index kernels
constexpr int kIndexThreads = 1024;
constexpr float kLn2 = std::numbers::ln2_v<float>;

// The number of near blocks: the first block of the sequence and the two that end with the token's own. With the
// default selection rule (1 initial and 2 local blocks) every token lists them, so neighbouring tokens share them. All
// other blocks of a list are far blocks: they are complete and precede the token. Results are correct for any number of
// near blocks; with this one, only far blocks differ between neighbours.
constexpr int kNear = 3;
__device__ __forceinline__ bool is_far(int block, int current) { return block > 0 && block + 1 < current; }

// Arguments of the KV-stationary kernels. A step is a range of tokens of one sequence and group; a launch computes
// several consecutive steps.
struct KvStationaryArgs {
  View<const bf16> q, k, v;
  View<bf16> o;
  View<float> lse;
  BlockLists lists;
  Divisor n, heads, block_keys;
  float scale_log2;
  int range_tokens, ranges, steps, launch_steps;  // ranges: per sequence and group; steps: ranges of all groups, group
                                                  // after group; launch_steps: steps per launch
  int parts;                                      // parts (of kPartTokens tokens each) per range
  int piece_tokens;                               // largest number of tokens per item
  int tile_tokens;                                // tokens per tile in compare_lists
  float union_limit;                              // the threshold of compare_lists
  int* differ;                                    // one value: 1 if these kernels compute the far blocks, 0 if another
                                                  // kernel computes all blocks
  int near_tokens;                                // tokens per CTA of the near kernel
  int* near;         // [B*Hkv,T] near blocks that the token lists: bit 0: its own, 1: the one before, 2: block 0
  int* counts;       // [steps, parts, blocks] entries of a block; after plan_items, the index of its first one
  int* entries;      // [steps, entries_stride] sorted by block: token minus first token of the range
  int* entry_of;     // [steps, range_tokens, n] the entry of each place in a token's list; -1: no far block
  int* item_counts;  // number of items of each launch
  int4* items;       // [launches, items_stride] (block, first entry, number of entries, step)
  int items_stride, entries_stride;
  bf16* partial;         // [launch_steps, entries_stride, G, dv] partial sums of o
  float2* partial_sums;  // row_max (in powers of 2) and sum of probabilities of the same rows
  __device__ __forceinline__ int first_token(int step) const { return step % ranges * range_tokens; }
  __device__ __forceinline__ int tokens_of(int step) const {
    return min(range_tokens, lists.tokens - first_token(step));
  }
  __device__ __forceinline__ int64_t first_row(int step) const {
    return static_cast<int64_t>(step % launch_steps) * entries_stride * heads.value();
  }
};

// ---- the index ----

// Returns the sum of `mine` over the threads before this one. total: the sum over all threads.
__device__ __forceinline__ int2 sum_before(int2 mine, int2& total) {
  return exclusive_scan<kIndexThreads>(mine, total, [](int2 a, int2 b) { return make_int2(a.x + b.x, a.y + b.y); });
}

// Calls f(token within the part, place in its list, block, the token's own block) for each list entry of a part's
// tokens.
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
      if (e0 + u * kIndexThreads < tokens * n) f(token[u], place[u], block[u], a.block_keys.quotient(first + token[u]));
  }
}
// A part of a step's range of tokens, which one CTA of an index kernel processes. index: number of the part, counted
// over all steps. in_range, first: its first token, counted from the start of the range and of the sequence. tokens:
// how many tokens it has.
struct Part {
  int step, in_range, first, tokens;
  __device__ __forceinline__ Part(const KvStationaryArgs& a, int index)
      : step(index / a.parts),
        in_range(index % a.parts * kPartTokens),
        first(a.first_token(step) + in_range),
        tokens(min(kPartTokens, a.tokens_of(step) - in_range)) {}
};

// Decides whether the lists of neighbouring tokens differ enough for the KV-stationary forward, and sets *differ. It
// compares kComparedTiles tiles, spread over all sequences: whether the union of a tile's lists has more than
// union_limit times the blocks of one list. Counts are exact, so the same lists give the same decision.
constexpr int kComparedTiles = 64;
__device__ __forceinline__ void compare_lists(const KvStationaryArgs& a) {
  __shared__ int in_unions, in_lists;
  for (int i = threadIdx.x; i * a.launch_steps < a.steps; i += kIndexThreads) a.item_counts[i] = 0;
  if (threadIdx.x == 0) in_unions = in_lists = 0;
  __syncthreads();
  const int words = (a.lists.blocks + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = a.n.value();
  unsigned* const listed = reinterpret_cast<unsigned*>(dynamic_shared()) + warp * words;
  const int tiles = ceil_div(a.lists.tokens, a.tile_tokens);  // tiles per sequence and group
  int unions = 0, entries = 0;
  for (int i = warp; i < kComparedTiles; i += kIndexThreads / 32) {
    const int64_t tile = static_cast<int64_t>(tiles) * (a.steps / a.ranges) * i / kComparedTiles;
    const int bg = static_cast<int>(tile / tiles), b = bg / a.lists.groups, g = bg % a.lists.groups;
    const int t0 = static_cast<int>(tile % tiles) * a.tile_tokens;
    const int count = min(a.tile_tokens, a.lists.tokens - t0) * n;
    for (int w = lane; w < words; w += 32) listed[w] = 0;
    __syncwarp();
    constexpr int kAtOnce = 8;
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
        atomicOr(&listed[block[u] / 32], 1u << block[u] % 32);
        ++entries;
      }
    }
    __syncwarp();
    for (int w = lane; w < words; w += 32) unions += __popc(listed[w]);
    __syncwarp();
  }
  atomicAdd(&in_unions, unions);
  atomicAdd(&in_lists, entries);
  __syncthreads();
  if (threadIdx.x == 0)
    *a.differ = static_cast<float>(in_unions) * static_cast<float>(a.tile_tokens) >
                a.union_limit * static_cast<float>(in_lists);
}

// The first index kernel. CTA 0 compares lists. Each other CTA counts, for one part, the far entries of each block, and
// records which near blocks its tokens list. read_lists_bytes is its shared memory, bytes.
inline int64_t read_lists_bytes(int64_t blocks) {
  return std::max<int64_t>(kIndexThreads / 32 * ceil_div(blocks, 32), blocks) * static_cast<int64_t>(sizeof(int));
}
__global__ void __launch_bounds__(kIndexThreads)
    kv_stationary_read_lists_kernel(const __grid_constant__ KvStationaryArgs a) {
  if (blockIdx.x == 0) return compare_lists(a);
  __shared__ unsigned listed_near[kPartTokens];
  int* const by_block = reinterpret_cast<int*>(dynamic_shared());  // the number of entries of each block
  const int index = blockIdx.x - 1;
  const Part part(a, index);
  for (int i = threadIdx.x; i < a.lists.blocks; i += kIndexThreads) by_block[i] = 0;
  for (int i = threadIdx.x; i < kPartTokens; i += kIndexThreads) listed_near[i] = 0;
  __syncthreads();
  for_entries(a, part.step, part.first, part.tokens, [&](int token, int, int block, int current) {
    if (is_far(block, current))
      atomicAdd(&by_block[block], 1);
    else if (block >= 0 && block <= current)
      atomicOr(&listed_near[token], block == current ? 1u : block + 1 == current ? 2u : 4u);
  });
  __syncthreads();
  for (int i = threadIdx.x; i < a.lists.blocks; i += kIndexThreads)
    a.counts[static_cast<int64_t>(index) * a.lists.blocks + i] = by_block[i];
  int* const near = a.near + static_cast<int64_t>(part.step / a.ranges) * a.lists.tokens + part.first;
  for (int i = threadIdx.x; i < part.tokens; i += kIndexThreads) near[i] = static_cast<int>(listed_near[i]);
}

// The second index kernel: computes by prefix sums the index of the first entry of each block and part, and cuts each
// block's entries into items. The order of the items depends on the order in which the CTAs run; the results do not.
__global__ void __launch_bounds__(kIndexThreads)
    kv_stationary_plan_items_kernel(const __grid_constant__ KvStationaryArgs a) {
  __shared__ int first_item;
  if (*a.differ == 0) return;
  const int step = blockIdx.x, launch = step / a.launch_steps;
  int* const counts = a.counts + static_cast<int64_t>(step) * a.parts * a.lists.blocks;
  int done = 0;
  for (int block0 = 0; block0 < a.lists.blocks; block0 += kIndexThreads) {
    const int block = block0 + threadIdx.x;
    const bool exists = block < a.lists.blocks;
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
// merge kernel looks up the partial sums of each entry and adds them in list order.
__global__ void __launch_bounds__(kIndexThreads)
    kv_stationary_fill_entries_kernel(const __grid_constant__ KvStationaryArgs a) {
  int* const by_block = reinterpret_cast<int*>(dynamic_shared());  // for each block, the index of its next entry
  if (*a.differ == 0) return;
  const Part part(a, blockIdx.x);
  for (int i = threadIdx.x; i < a.lists.blocks; i += kIndexThreads)
    by_block[i] = a.counts[static_cast<int64_t>(blockIdx.x) * a.lists.blocks + i];
  __syncthreads();
  int* const out = a.entries + static_cast<int64_t>(part.step) * a.entries_stride;
  int* const entry_of = a.entry_of + static_cast<int64_t>(part.step) * a.entries_stride;
  for_entries(a, part.step, part.first, part.tokens, [&](int token, int place, int block, int current) {
    const bool far = is_far(block, current);
    const int entry = far ? atomicAdd(&by_block[block], 1) : -1;
    if (far) out[entry] = part.in_range + token;
    entry_of[(part.in_range + token) * a.n.value() + place] = entry;
  });
}

}  // namespace
}  // namespace triad::cuda
