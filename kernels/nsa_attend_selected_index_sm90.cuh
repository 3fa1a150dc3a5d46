// What the kernels of nsa_attend_selected_sm90.cu are given, and the first three of them: whether the route pays, which
// entries of which block lie in which range of tokens, and where each range's items begin in the queue.
#pragma once
#include "kernels/nsa_attend.cuh"
#include "kernels/wgmma_sm90.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileRows = 64;
constexpr int kPanelBytes = kTileRows * kPanelRowBytes;  // 64 rows (or keys) of 64 columns
constexpr int kItemTiles = 16;                           // most tiles of one item: popular blocks are cut
constexpr int kPlans = 12, kWorks = 12;                  // rings of what loaders and gatherers are told
constexpr int kUnitsAtOnce = 4;                          // that a warp takes from the queue of merges
constexpr int kIndexThreads = 1024;
constexpr float kLog2e = 1.4426950408889634f;

// A token's near blocks are the first one and the two that end with its own: by the selection's rule every token lists
// them, so neighbouring tokens share them whatever else they list. The others are complete and past.
constexpr int kNear = 3;
__device__ __forceinline__ bool is_far(int block, int current) { return block > 0 && block + 1 < current; }

// block_index [B,T,Hkv,n]
struct BlockLists {
  const int* data;
  int64_t batch, row, head;
  int tokens, groups, blocks;  // blocks: of T tokens, ceil(T / l')
  __device__ __forceinline__ const int* at(int b, int t, int g) const {
    return data + b * batch + static_cast<int64_t>(t) * row + g * head;
  }
};

struct FarArgs {
  View<const bf16> q, k, v;
  View<bf16> o;
  View<float> lse;
  BlockLists lists;
  Divisor n, heads, block_keys;
  float scale_log2;
  int range_tokens, ranges, steps, buffers;  // steps: ranges of all (b, g), group after group
  int piece_tokens;                          // of an item, at most
  int merge_rows;                            // of a merge item
  int tile_tokens;                           // that share a union tile
  float union_limit;                         // see compare_lists_kernel
  int* differ;                               // 1: far blocks are done here; 0: union tiles do all
  int* near;                                 // [B,T,Hkv,n] the blocks that union tiles do, -1 at the end
  // By step: how many items; the items (block, first entry, entries); the entries, t - (range's first token) << 6 | i.
  int* item_counts;
  int4* items;
  int* entries;
  int items_stride, entries_stride;
  int* starts;             // [steps + 1] where a step's items begin in the queue
  int *gathered, *merged;  // by step: items gathered, merge items done
  int *gather_queue, *merge_queue;
  bf16* partial;       // [buffers, range_tokens * n * G, dv]
  float* partial_lse;  // the same rows, in powers of 2
  __device__ __forceinline__ int first_token(int step) const { return step % ranges * range_tokens; }
  __device__ __forceinline__ int tokens_of(int step) const {
    return min(range_tokens, lists.tokens - first_token(step));
  }
  __device__ __forceinline__ int merge_items(int step) const {
    return (tokens_of(step) * heads.value() + merge_rows - 1) / merge_rows;
  }
  __device__ __forceinline__ int64_t buffer_row(int step) const {
    return static_cast<int64_t>(step % buffers) * range_tokens * n.value() * heads.value();
  }
};

// ---- the index ----

// The sum of `mine` over the threads before this one.
__device__ __forceinline__ int2 sum_before(int2 mine, int2& total) {
  __shared__ int2 warp_sums[kIndexThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan_warp = [&](int2 sum) {
    for (int by = 1; by < 32; by *= 2) {
      const int x = __shfl_up_sync(kFullWarp, sum.x, by), y = __shfl_up_sync(kFullWarp, sum.y, by);
      if (lane >= by) sum.x += x, sum.y += y;
    }
    return sum;
  };
  const int2 in_warp = scan_warp(mine);
  if (lane == 31) warp_sums[warp] = in_warp;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = scan_warp(warp_sums[lane]);
  __syncthreads();
  total = warp_sums[kIndexThreads / 32 - 1];
  const int2 before = warp > 0 ? warp_sums[warp - 1] : int2{};
  __syncthreads();  // warp_sums is free for the next call
  return {before.x + in_warp.x - mine.x, before.y + in_warp.y - mine.y};
}

// Whether neighbours' lists differ so much that this route pays: in tiles spread over all sequences, the union of a
// tile's lists has more than union_limit times the blocks of one list. Counts are exact: the same lists, the same
// route.
constexpr int kComparedTiles = 128;
__global__ void __launch_bounds__(kIndexThreads) compare_lists_kernel(const __grid_constant__ FarArgs a) {
  __shared__ int in_unions, in_lists;
  if (threadIdx.x == 0) in_unions = in_lists = 0;
  __syncthreads();
  const int words = (a.lists.blocks + 31) / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = a.n.value();
  unsigned* const listed = reinterpret_cast<unsigned*>(dynamic_shared()) + warp * words;
  const int tiles = (a.lists.tokens + a.tile_tokens - 1) / a.tile_tokens;  // of a sequence and group
  int unions = 0, entries = 0;
  for (int i = warp; i < kComparedTiles; i += kIndexThreads / 32) {
    const int64_t tile = static_cast<int64_t>(tiles) * (a.steps / a.ranges) * i / kComparedTiles;
    const int bg = static_cast<int>(tile / tiles), b = bg / a.lists.groups, g = bg % a.lists.groups;
    const int t0 = static_cast<int>(tile % tiles) * a.tile_tokens;
    const int count = min(a.tile_tokens, a.lists.tokens - t0) * n;
    for (int w = lane; w < words; w += 32) listed[w] = 0;
    __syncwarp();
    for (int e = lane; e < count; e += 32) {
      const int row = a.n.quotient(e), block = a.lists.at(b, t0 + row, g)[e - row * n];
      if (block < 0) continue;
      atomicOr(&listed[block / 32], 1u << block % 32);
      ++entries;
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

__global__ void __launch_bounds__(kIndexThreads) index_range_kernel(const __grid_constant__ FarArgs a) {
  int* const by_block = reinterpret_cast<int*>(dynamic_shared());  // counts, then where the next entry goes
  const int step = blockIdx.x, bg = step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups;
  const int t0 = a.first_token(step), tokens = a.tokens_of(step), n = a.n.value(), count = tokens * n;
  const int blocks = a.block_keys.quotient(t0 + tokens - 1) + 1;
  const auto for_far_entries = [&](auto&& f) {
    constexpr int kAtOnce = 4;
    for (int e0 = threadIdx.x; e0 < count; e0 += kAtOnce * kIndexThreads) {
      int row[kAtOnce], i[kAtOnce], block[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int e = e0 + u * kIndexThreads;
        row[u] = a.n.quotient(e), i[u] = e - row[u] * n;
        block[u] = e < count ? a.lists.at(b, t0 + row[u], g)[i[u]] : -1;
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (is_far(block[u], a.block_keys.quotient(t0 + row[u]))) f(block[u], row[u] << 6 | i[u]);
    }
  };

  const bool differ = *a.differ != 0;
  for (int i = threadIdx.x; i < blocks; i += kIndexThreads) by_block[i] = 0;
  for (int i = threadIdx.x; i < tokens; i += kIndexThreads) {
    const int t = t0 + i, current = a.block_keys.quotient(t);
    const int* const list = a.lists.at(b, t, g);
    int* const near = a.near + ((static_cast<int64_t>(b) * a.lists.tokens + t) * a.lists.groups + g) * n;
    int count = 0;
    for (int j = 0; j < n; ++j)
      if (list[j] >= 0 && list[j] <= current && !(differ && is_far(list[j], current))) near[count++] = list[j];
    while (count < n) near[count++] = -1;
  }
  if (!differ) return;
  __syncthreads();
  for_far_entries([&](int block, int) { atomicAdd(&by_block[block], 1); });
  __syncthreads();
  int2 done{};
  for (int block0 = 0; block0 < blocks; block0 += kIndexThreads) {
    const int block = block0 + threadIdx.x, entries = block < blocks ? by_block[block] : 0;
    const int pieces = (entries + a.piece_tokens - 1) / a.piece_tokens;
    int2 total;
    int2 at = sum_before({entries, pieces}, total);
    at.x += done.x, at.y += done.y;
    done.x += total.x, done.y += total.y;
    if (block < blocks) by_block[block] = at.x;
    for (int i = 0; i < pieces; ++i) {
      const int first = i * a.piece_tokens;
      a.items[static_cast<int64_t>(step) * a.items_stride + at.y + i] =
          make_int4(block, at.x + first, min(a.piece_tokens, entries - first), 0);
    }
  }
  if (threadIdx.x == 0) a.item_counts[step] = done.y;
  __syncthreads();
  int* const out = a.entries + static_cast<int64_t>(step) * a.entries_stride;
  for_far_entries([&](int block, int entry) { out[atomicAdd(&by_block[block], 1)] = entry; });
}

__global__ void __launch_bounds__(kIndexThreads) plan_steps_kernel(const __grid_constant__ FarArgs a) {
  if (*a.differ == 0) return;
  int done = 0;
  for (int step0 = 0; step0 <= a.steps; step0 += kIndexThreads) {
    const int step = step0 + threadIdx.x;
    if (step < a.steps) a.gathered[step] = a.merged[step] = 0;
    int2 total;
    const int before = sum_before({step < a.steps ? a.item_counts[step] : 0, 0}, total).x;
    if (step <= a.steps) a.starts[step] = done + before;
    done += total.x;
  }
  if (threadIdx.x == 0) *a.gather_queue = *a.merge_queue = 0;
}

}  // namespace
}  // namespace triad::cuda
