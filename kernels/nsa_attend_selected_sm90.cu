// The selected branch's far blocks on Hopper, seen from the blocks (bf16).
//
// Where neighbouring tokens list different blocks a tile of rows that shares the union of their lists multiplies mostly
// masked scores (KERNELS.md 4.2: 7 times too many for ten tokens with random lists at T = 65536). Here a block's keys
// and values lie in shared memory and the rows (t, h) of the tokens that list it are gathered, 64 a tile, for any G
// without waste: s = q k^T, softmax over this one block, o = p v. What a row gets from a block is a partial sum, (o,
// lse) in slot (t, place in the list); later its partial sums are merged, in the list's order. Near blocks, which all
// neighbours list, were done by union tiles: o and lse hold their sums and take part in the merge.
//
// Partial sums of all tokens would be n * dv * 2 bytes a row: 1.3 GB at 65536 x 12 x 64. So the sequence goes in ranges
// of tokens whose partial sums fit L2, several buffers of them in a ring, never read from memory when all goes well:
//   index_range_kernel   one CTA for each range of each (b, g): the entries (t, i) of its far blocks, by block. The
//   order
//                        within a block is left to chance: each entry has its own slot, so no result depends on it
//   plan_steps_kernel    where each range's work begins in one queue: step s gathers range s and merges range s - kLag
//   attend_far_kernel    persistent. One warp takes work from the queue and brings rows, keys and values (cp.async)
//                        into rings of stages; three warpgroups gather or merge, a stage each; one warp tells the
//                        other CTAs what is done. Whoever waits, waits for work taken before: no deadlock.
//
// L2 traffic of an entry of G rows: G * (dk read, dv written, dv read) * 2 bytes, 2.3 KB at G = 6 and d = 64, beside
// l' * (dk + dv) * 2 bytes for each block and range.
#include "kernels/nsa_attend_selected_sm90.cuh"

#include "kernels/nsa_attend_sm90.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileRows = 64, kConsumers = 3, kLag = 2;
constexpr int kPanelBytes = kTileRows * kPanelRowBytes;  // 64 rows (or keys) of 64 columns
constexpr int kItemTiles = 16;                           // most tiles of one item: popular blocks are cut
constexpr int kLoaders = 2, kPlans = 12, kMergeTurns = 1;
constexpr int kIndexThreads = 1024;
constexpr float kLog2e = 1.4426950408889634f;

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
  // By step: how many items; the items (block, first entry, entries); the entries, t - (range's first token) << 6 | i.
  int* item_counts;
  int4* items;
  int* entries;
  int items_stride, entries_stride;
  int* starts;             // [steps + kLag + 1] of each step in the queue
  int *gathered, *merged;  // by step: items done
  int* queue;
  bf16* partial;       // [buffers, range_tokens * n * G, dv]
  float* partial_lse;  // the same rows, in powers of 2
  __device__ __forceinline__ int first_token(int step) const { return step % ranges * range_tokens; }
  __device__ __forceinline__ int tokens_of(int step) const {
    return min(range_tokens, lists.tokens - first_token(step));
  }
  __device__ __forceinline__ int merge_items(int step) const {
    if (item_counts[step] == 0) return 0;
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

  for (int i = threadIdx.x; i < blocks; i += kIndexThreads) by_block[i] = 0;
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
  int done = 0;
  for (int step0 = 0; step0 <= a.steps + kLag; step0 += kIndexThreads) {
    const int step = step0 + threadIdx.x;
    int work = 0;
    if (step < a.steps) {
      work += a.item_counts[step];
      a.gathered[step] = a.merged[step] = 0;
    }
    if (step >= kLag && step < a.steps + kLag) work += a.merge_items(step - kLag);
    int2 total;
    const int before = sum_before({work, 0}, total).x;
    if (step <= a.steps + kLag) a.starts[step] = done + before;
    done += total.x;
  }
  if (threadIdx.x == 0) *a.queue = 0;
}

// ---- gathering and merging ----

enum WorkKind { kGather, kMerge, kEnd };
struct Work {
  WorkKind kind;
  int step, index;  // of a merge: index among the range's
  int4 item;        // of a gather
};

// What the loaders are told of a stage, some stages ahead.
struct StagePlan {
  int kind, step, index;     // of a merge: index among the range's; of an end: how many ends came before
  int block, tile, entries;  // of a gather: the item's block, the tile in it and how many tokens list the block
  int tiles;                 // of the item
  int kv, kv_parity;         // its buffer of keys and values, and the parity of its turn there
  int entry[kTileRows];      // by row
};
// What the consumers are told.
struct StageWork {
  int kind, step, index, kv, kv_parity, ends_item;
  int to[kTileRows];  // where row r's partial sum goes in its buffer; -1: there is no such row
};

__device__ __forceinline__ int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void add_release(int* p, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// Stages of rows and buffers of keys and values: what fits 227 KB for blocks of 64 keys, and of 128.
template <int kDk, int kDv>
struct FarShape {
  static constexpr int kStages = kDk == 64 ? 9 : kDk == 128 ? 5 : 3;
  static constexpr int kRowBytes = kDk / kPanel * kPanelBytes;          // of a stage
  static constexpr int kKeyBytes = (kDk + kDv) / kPanel * kPanelBytes;  // of 64 keys and values
  static constexpr int kKeyRoom = (224 * 1024 - kStages * kRowBytes) / kKeyBytes;
  static constexpr int kMaxBuffers = 6;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
};

template <int kDk, int kDv>
struct Far {
  using Shape = FarShape<kDk, kDv>;
  static constexpr int kStages = Shape::kStages, kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel;

  const FarArgs& a;
  unsigned char *stages, *keys;
  StagePlan* plans;
  StageWork* works;
  uint32_t barriers;  // full, empty, stored of each stage; full, empty of each buffer of keys, and of each plan
  int key_tiles, key_buffers;

  __device__ __forceinline__ uint32_t full(int i) const { return barriers + 8 * i; }
  __device__ __forceinline__ uint32_t empty(int i) const { return barriers + 8 * (kStages + i); }
  __device__ __forceinline__ uint32_t stored(int i) const { return barriers + 8 * (2 * kStages + i); }
  __device__ __forceinline__ uint32_t keys_full(int i) const { return barriers + 8 * (3 * kStages + i); }
  __device__ __forceinline__ uint32_t keys_empty(int i) const {
    return barriers + 8 * (3 * kStages + Shape::kMaxBuffers + i);
  }
  __device__ __forceinline__ uint32_t plan_full(int i) const {
    return barriers + 8 * (3 * kStages + 2 * Shape::kMaxBuffers + i);
  }
  __device__ __forceinline__ uint32_t plan_empty(int i) const { return plan_full(kPlans + i); }
  __device__ __forceinline__ unsigned char* stage(int i) const { return stages + i * Shape::kRowBytes; }
  __device__ __forceinline__ unsigned char* key_buffer(int i) const { return keys + i * key_tiles * Shape::kKeyBytes; }

  // The warp that takes work from the queue and looks up its entries. It runs ahead of the loaders by a ring of plans,
  // so that none of the loads that lead to an address (ticket, item, entries: 700 clocks each) is waited for.
  __device__ __forceinline__ void scout() const {
    const int lane = threadIdx.x % 32, G = a.heads.value(), end_step = a.steps + kLag;
    int step = -1, begin = 0, end = 0, gathers = 0, merges = 0, span = 1;
    int ticket = lane == 0 ? atomicAdd(a.queue, 1) : 0;
    // The next work of the queue; its item is on its way.
    const auto take = [&] {
      const int at = __shfl_sync(kFullWarp, ticket, 0);
      ticket = lane == 0 ? atomicAdd(a.queue, 1) : 0;
      while (at >= end) {
        if (++step == end_step) return Work{kEnd, 0, 0, {}};
        begin = end, end = a.starts[step + 1];
        merges = step >= kLag ? a.merge_items(step - kLag) : 0, gathers = end - begin - merges;
        span = max(max(merges, (gathers + merges) / 2), 1);  // merges are spread evenly over half the step
      }
      const int k = at - begin;
      const auto merges_before = [&](int k) { return min(merges, static_cast<int>(int64_t{k} * merges / span)); };
      const int before = merges_before(k);
      if (merges_before(k + 1) > before) return Work{kMerge, step - kLag, before, {}};
      return Work{kGather, step, 0, __ldg(a.items + static_cast<int64_t>(step) * a.items_stride + k - before)};
    };
    int n = 0, n_keys = 0;
    const auto open_plan = [&](const Work& w) -> StagePlan& {
      const int i = n % kPlans;
      barrier_wait(plan_empty(i), (n / kPlans & 1) ^ 1);
      if (lane == 0) plans[i].kind = w.kind, plans[i].step = w.step, plans[i].index = w.index;
      return plans[i];
    };
    const auto close_plan = [&] {
      barrier_arrive_after_copies(plan_full(n % kPlans));
      barrier_arrive(plan_full(n % kPlans));
      ++n;
    };
    Work now = take();
    while (now.kind != kEnd) {
      const Work next = take();
      if (now.kind == kMerge) {
        open_plan(now);
        close_plan();
      } else {
        const int last = now.item.z - 1, tiles = (now.item.z * G + kTileRows - 1) / kTileRows;
        const int* const entries = a.entries + static_cast<int64_t>(now.step) * a.entries_stride + now.item.y;
        for (int tile = 0; tile < tiles; ++tile) {
          StagePlan& plan = open_plan(now);
          if (lane == 0) {
            plan.block = now.item.x, plan.tile = tile, plan.entries = now.item.z, plan.tiles = tiles;
            plan.kv = n_keys % key_buffers, plan.kv_parity = n_keys / key_buffers & 1;
          }
#pragma unroll
          for (int r = lane; r < kTileRows; r += 32)
            copy_async_4(&plan.entry[r], entries + min(a.heads.quotient(tile * kTileRows + r), last), true);
          close_plan();
        }
        ++n_keys;
      }
      now = next;
    }
    for (int i = 0; i < kConsumers; ++i) {
      now.index = i;
      open_plan(now);
      close_plan();
    }
  }

  // A warp that brings every kLoaders-th stage's rows, and the keys and values where a stage is its item's first.
  __device__ __forceinline__ void load(int loader) const {
    const int lane = threadIdx.x % 32, G = a.heads.value(), n_listed = a.n.value();
    const int q_row = static_cast<int>(a.q.row / 8), q_head = static_cast<int>(a.q.head / 8);  // in 16 bytes
    int known_gathered = -1, known_merged = -1;                                                // steps known to be done
    const auto await = [&](const int* done, int target, int& known, int step) {
      if (step <= known) return;
      while (load_acquire(done + step) < target) __nanosleep(40);
      known = step;
    };
    for (int n = loader;; n += kLoaders) {
      barrier_wait(plan_full(n % kPlans), n / kPlans & 1);
      const StagePlan& plan = plans[n % kPlans];
      const int kind = plan.kind, step = plan.step, index = plan.index, i = n % kStages;
      if (kind == kGather) {
        const int bg = step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups;
        const int block = plan.block, tile = plan.tile, entries = plan.entries, tiles = plan.tiles;
        const int kv = plan.kv, kv_parity = plan.kv_parity;
        const int entry[2] = {plan.entry[lane], plan.entry[lane + 32]};
        __syncwarp();
        if (lane == 0) barrier_arrive(plan_empty(n % kPlans));
        if (tile == 0) {
          barrier_wait(keys_empty(kv), kv_parity ^ 1);
          if (lane == 0) barrier_arrive(keys_empty(kv), 4 * (kItemTiles - tiles) + 1);
          load_keys(b, g, block, key_buffer(kv));
          barrier_arrive_after_copies(keys_full(kv));
        }
        const int before = step - a.buffers;  // whose partial sums the buffer still holds
        if (before >= 0) await(a.merged, a.merge_items(before), known_merged, before);
        barrier_wait(empty(i), (n / kStages & 1) ^ 1);
        StageWork& work = works[i];
        if (lane == 0)
          work.kind = kind, work.step = step, work.kv = kv, work.kv_parity = kv_parity,
          work.ends_item = tile + 1 == tiles;
        int from[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int row = tile * kTileRows + lane + 32 * j, in_list = a.heads.quotient(row), h = row - in_list * G;
          const int t = entry[j] >> 6;
          from[j] = t * q_row + h * q_head;
          work.to[lane + 32 * j] = in_list < entries ? (t * n_listed + (entry[j] & 63)) * G + h : -1;
        }
        load_query(a.q.at(b, a.first_token(step), g * G), from, stage(i));
      } else {
        __syncwarp();
        if (lane == 0) barrier_arrive(plan_empty(n % kPlans));
        if (kind == kMerge) await(a.gathered, a.item_counts[step], known_gathered, step);
        barrier_wait(empty(i), (n / kStages & 1) ^ 1);
        if (lane == 0) works[i].kind = kind, works[i].step = step, works[i].index = index;
      }
      barrier_arrive_after_copies(full(i));
      barrier_arrive(full(i));
      if (kind == kEnd && index + kLoaders >= kConsumers) return;
    }
  }

  // 64 rows; lane r knows where rows r and r + 32 begin, in 16 bytes. A row that does not exist repeats the last one.
  __device__ __forceinline__ void load_query(const bf16* q, const int (&from)[2], unsigned char* to) const {
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    const int at = swizzled(lane / 8, chunk);
#pragma unroll
    for (int i = 0; i < kTileRows / 4; ++i) {
      const int64_t row = __shfl_sync(kFullWarp, from[i / 8], 4 * (i % 8) + lane / 8);
      const bf16* source = q + 8 * (row + chunk);
#pragma unroll
      for (int p = 0; p < kPanelsK; ++p)
        copy_async_16(to + p * kPanelBytes + (at ^ (i % 2 * 4 << 4)) + i * 4 * kPanelRowBytes, source + p * kPanel, 16);
    }
  }

  // A tile of 64 keys has its panels of k, then those of v.
  __device__ __forceinline__ void load_keys(int b, int g, int block, unsigned char* to) const {
    const int lane = threadIdx.x % 32, chunk = lane % 8, block_keys = a.block_keys.value();
    const int at = swizzled(lane / 8, chunk);
    const int64_t k_step = 4 * a.k.row, v_step = 4 * a.v.row;
    const bf16* k = a.k.at(b, block * block_keys + lane / 8, g) + 8 * chunk;
    const bf16* v = a.v.at(b, block * block_keys + lane / 8, g) + 8 * chunk;
    for (int tile = 0; tile < key_tiles; ++tile, to += Shape::kKeyBytes) {
      const int rows = min(block_keys - tile * kTileRows, kTileRows);
#pragma unroll 4
      for (int i = 0; i < rows / 4; ++i, k += k_step, v += v_step) {
        unsigned char* const row = to + (at ^ (i % 2 * 4 << 4)) + i * 4 * kPanelRowBytes;
#pragma unroll
        for (int p = 0; p < kPanelsK; ++p) copy_async_16(row + p * kPanelBytes, k + p * kPanel, 16);
#pragma unroll
        for (int p = 0; p < kPanelsV; ++p) copy_async_16(row + (kPanelsK + p) * kPanelBytes, v + p * kPanel, 16);
      }
    }
  }

  // A warpgroup that computes: every kConsumers-th stage.
  __device__ __forceinline__ void consume(int consumer) const {
    const int lane = threadIdx.x % 32;
    for (int n = consumer;; n += kConsumers) {
      const int i = n % kStages;
      barrier_wait(full(i), n / kStages & 1);
      const StageWork& work = works[i];
      const int kind = work.kind;
      if (kind == kGather) {
        barrier_wait(keys_full(work.kv), work.kv_parity);
        fence_async_proxy();
        gather(work, stage(i), consumer);
      } else if (kind == kMerge) {
        merge(work.step, work.index);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(stored(i));
      if (kind == kEnd) return;
    }
  }

  __device__ __forceinline__ void gather(const StageWork& work, unsigned char* rows, int consumer) const {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x % kWarpgroup / 32 * 16;
    const uint32_t q = tile_descriptor(shared_address(rows));
    const uint32_t k = tile_descriptor(shared_address(key_buffer(work.kv)));
    constexpr int kPanelUnits = kPanelBytes >> 4, kSteps = kTileRows / 16;
    float o[kPanelsV][8][4], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int p = 0; p < kPanelsV; ++p) leave_unset(o[p]);

    for (int tile = 0; tile < key_tiles; ++tile) {
      const uint32_t k_tile = k + tile * (Shape::kKeyBytes >> 4), v_tile = k_tile + kPanelsK * kPanelUnits;
      float s[8][4];
      leave_unset(s);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kDk / 16; ++i) {
        const int at = i / 4 * kPanelUnits + 2 * (i % 4);
        wgmma_shared(s, q + at, k_tile + at, i > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(s);
      const int keys_here = a.block_keys.value() - tile * kTileRows;
      if (keys_here < kTileRows) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (8 * j + fragment_column() + e % 2 >= keys_here) s[j][e] = -INFINITY;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float best = top[i];
#pragma unroll
        for (int j = 0; j < 8; ++j) best = fmaxf(best, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
        best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, 1));
        best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, 2));
        const float base = best * a.scale_log2;
        if (tile > 0) {
          const float shrink = exp2_approx(fmaf(top[i], a.scale_log2, -base));
          sum[i] *= shrink;
#pragma unroll
          for (int p = 0; p < kPanelsV; ++p)
#pragma unroll
            for (int j = 0; j < 8; ++j) o[p][j][2 * i] *= shrink, o[p][j][2 * i + 1] *= shrink;
        }
        top[i] = best;
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 2 * i; e < 2 * i + 2; ++e) sum[i] += s[j][e] = exp2_approx(fmaf(s[j][e], a.scale_log2, -base));
      }
      uint32_t left[kSteps][4];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) pack_operand(left[i], s, i);
      wgmma_fence();
#pragma unroll
      for (int p = 0; p < kPanelsV; ++p)
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
          wgmma_across(o[p], left[i], v_tile + p * kPanelUnits + i * (16 * kPanelRowBytes >> 4), tile > 0 || i > 0);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int p = 0; p < kPanelsV; ++p) pin(o[p]);
    }
    if (lane == 0) barrier_arrive(keys_empty(work.kv));

    // Every warp has read its rows of q: their place takes o on its way to whole lines.
    asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
    const int64_t buffer = a.buffer_row(work.step);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kFullWarp, sum[i], 1);
      sum[i] += __shfl_xor_sync(kFullWarp, sum[i], 2);
      const int to = work.to[warp_row + fragment_row() + 8 * i];
      if (lane % 4 == 0 && to >= 0) a.partial_lse[buffer + to] = fmaf(top[i], a.scale_log2, log2f(sum[i]));
      sum[i] = 1.0f / sum[i];
    }
    const uint32_t staged = shared_address(rows) + (warp_row + lane % 16) * kPanelRowBytes;
#pragma unroll
    for (int p = 0; p < kPanelsV; ++p)
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        store_matrices(staged + p * kPanelBytes + ((j + lane / 16 ^ lane % 8) << 4),
                       pack_bf16(o[p][j][0] * sum[0], o[p][j][1] * sum[0]),
                       pack_bf16(o[p][j][2] * sum[1], o[p][j][3] * sum[1]),
                       pack_bf16(o[p][j + 1][0] * sum[0], o[p][j + 1][1] * sum[0]),
                       pack_bf16(o[p][j + 1][2] * sum[1], o[p][j + 1][3] * sum[1]));
    __syncwarp();
    constexpr int kLanes = kDv / 8, kRowsAtOnce = 32 / kLanes;
    const int column = lane % kLanes;
#pragma unroll
    for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
      const int row = warp_row + i * kRowsAtOnce + lane / kLanes, to = work.to[row];
      const uint4 x = *reinterpret_cast<const uint4*>(rows + column / 8 * kPanelBytes + swizzled(row, column % 8));
      if (to >= 0) *reinterpret_cast<uint4*>(a.partial + (buffer + to) * kDv + 8 * column) = x;
    }
  }

  // Some rows of a range: a few lanes each have 8 columns of a row. What the loads of partial sums wait for (lists,
  // then weights) is loaded for all of the warp's rows together.
  __device__ __forceinline__ void merge(int step, int index) const {
    constexpr int kLanes = kDv / 8, kRowsAtOnce = 32 / kLanes, kTurns = kMergeTurns, kChunk = 8, kChunks = 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32, G = a.heads.value(), n = a.n.value();
    const int bg = step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups, t0 = a.first_token(step);
    const int rows = a.tokens_of(step) * G, column = 8 * (lane % kLanes), first_lane = lane / kLanes * kLanes;
    const int64_t buffer = a.buffer_row(step);
    const int row0 = (index * 4 + warp) * kTurns * kRowsAtOnce + lane / kLanes;
    float out[kTurns][8], top[kTurns], sum[kTurns];
    uint4 near[kTurns];
    int in_range[kTurns], head[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = min(row0 + i * kRowsAtOnce, rows - 1);
      in_range[i] = a.heads.quotient(row), head[i] = row - in_range[i] * G;
      near[i] = *reinterpret_cast<const uint4*>(a.o.at(b, t0 + in_range[i], g * G + head[i]) + column);
      top[i] = *a.lse.at(b, t0 + in_range[i], g * G + head[i]);
    }
    for (int i0 = 0; i0 < n; i0 += kChunks * kChunk) {
      int listed[kTurns][kChunks];
      float weight_log2[kTurns][kChunks];
      unsigned fars[kTurns][kChunks];
#pragma unroll
      for (int i = 0; i < kTurns; ++i)
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const int mine = i0 + c * kChunk + lane % kChunk;
          listed[i][c] = mine < n ? a.lists.at(b, t0 + in_range[i], g)[mine] : -1;
        }
      // Of the list's place `mine` the slot; the next place is G rows further.
      const auto slot = [&](int i, int mine) { return buffer + (in_range[i] * n + mine) * G + head[i]; };
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int current = a.block_keys.quotient(t0 + in_range[i]);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const int mine = i0 + c * kChunk + lane % kChunk;
          const bool far = is_far(listed[i][c], current);
          weight_log2[i][c] = far ? __ldcg(a.partial_lse + slot(i, mine)) : -INFINITY;
          fars[i][c] = __ballot_sync(kFullWarp, far) >> first_lane;
        }
      }
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const bf16* const first = a.partial + slot(i, i0) * kDv + column;
        if (i0 == 0) {
          top[i] *= kLog2e, sum[i] = top[i] == -INFINITY ? 0.0f : 1.0f;
          load_bf16(out[i], near[i]);
        }
        float best = fmaxf(weight_log2[i][0], weight_log2[i][1]);
#pragma unroll
        for (int by = 1; by < kChunk; by *= 2) best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, by));
        best = fmaxf(best, top[i]);
        const float base = best == -INFINITY ? 0.0f : best, shrink = exp2_approx(top[i] - base);
        top[i] = best, sum[i] *= shrink;
#pragma unroll
        for (int e = 0; e < 8; ++e) out[i][e] *= shrink;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const float mine_weighs = exp2_approx(weight_log2[i][c] - base);
          uint4 x[kChunk];
#pragma unroll
          for (int j = 0; j < kChunk; ++j)
            x[j] = fars[i][c] >> j & 1 ? __ldcg(reinterpret_cast<const uint4*>(first + (c * kChunk + j) * G * kDv))
                                       : make_uint4(0, 0, 0, 0);
#pragma unroll
          for (int j = 0; j < kChunk; ++j) {
            const float weight = __shfl_sync(kFullWarp, mine_weighs, first_lane + j);
            float values[8];
            load_bf16(values, x[j]);
            sum[i] += weight;
#pragma unroll
            for (int e = 0; e < 8; ++e) out[i][e] = fmaf(weight, values[e], out[i][e]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (row0 + i * kRowsAtOnce >= rows) continue;
      const float inverse = sum[i] == 0.0f ? 0.0f : 1.0f / sum[i];
      const float(&x)[8] = out[i];
      *reinterpret_cast<uint4*>(a.o.at(b, t0 + in_range[i], g * G + head[i]) + column) =
          make_uint4(pack_bf16(x[0] * inverse, x[1] * inverse), pack_bf16(x[2] * inverse, x[3] * inverse),
                     pack_bf16(x[4] * inverse, x[5] * inverse), pack_bf16(x[6] * inverse, x[7] * inverse));
      if (column == 0)
        *a.lse.at(b, t0 + in_range[i], g * G + head[i]) =
            sum[i] == 0.0f ? -INFINITY : (top[i] + log2f(sum[i])) * 0.6931471805599453f;
    }
  }
  static __device__ __forceinline__ void load_bf16(float (&x)[8], const uint4& u) {
    const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }

  // The warp that frees stages and tells the other CTAs of work whose stores can be seen.
  __device__ __forceinline__ void report() const {
    for (int n = 0;; ++n) {
      const int i = n % kStages;
      barrier_wait(stored(i), n / kStages & 1);
      const StageWork& work = works[i];
      const int kind = work.kind, step = work.step, ends_item = work.ends_item;
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        barrier_arrive(empty(i));
        if (kind == kMerge)
          add_release(a.merged + step, 1);
        else if (kind == kGather && ends_item)
          add_release(a.gathered + step, 1);
      }
      if (kind == kEnd) return;
    }
  }
};

template <int kDk, int kDv>
__global__ void __launch_bounds__(FarShape<kDk, kDv>::kThreads, 1)
    attend_far_kernel(const __grid_constant__ FarArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  using Shape = FarShape<kDk, kDv>;
  __shared__ StagePlan plans[kPlans];
  __shared__ StageWork works[Shape::kStages];
  __shared__ __align__(8) uint64_t barriers[3 * Shape::kStages + 2 * Shape::kMaxBuffers + 2 * kPlans];
  unsigned char* const shared = aligned_shared();
  const int key_tiles = (a.block_keys.value() + kTileRows - 1) / kTileRows;
  const int key_buffers = min(Shape::kMaxBuffers, Shape::kKeyRoom / key_tiles);
  const Far<kDk, kDv> far{a,         shared,     shared + Shape::kStages * Shape::kRowBytes,
                          plans,     works,      shared_address(barriers),
                          key_tiles, key_buffers};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(far.full(i), 64);  // of each lane one for its copies and one for what it stored itself
      barrier_init(far.empty(i), 1);
      barrier_init(far.stored(i), kWarpgroup / 32);
    }
    for (int i = 0; i < Shape::kMaxBuffers; ++i) {
      barrier_init(far.keys_full(i), 32);
      barrier_init(far.keys_empty(i), 4 * kItemTiles + 1);  // the producer arrives for the tiles that an item lacks
    }
    for (int i = 0; i < kPlans; ++i) {
      barrier_init(far.plan_full(i), 64);
      barrier_init(far.plan_empty(i), 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (a.block_keys.value() % kTileRows != 0)  // values past the block's end weigh 0, if they are numbers
    for (int i = threadIdx.x; i < key_buffers * key_tiles * Shape::kKeyBytes / 16; i += Shape::kThreads)
      reinterpret_cast<uint4*>(far.keys)[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == kConsumers) {
    give_registers<56>();
    const int warp = threadIdx.x % kWarpgroup / 32;
    if (warp < kLoaders)
      far.load(warp);
    else if (warp == kLoaders)
      far.scout();
    else
      far.report();
  } else {
    take_registers<152>();
    far.consume(warpgroup);
  }
#endif
}

// Ranges of so many tokens that their partial sums take about kBufferBytes, and a few buffers of them.
constexpr int64_t kBufferBytes = 12 << 20;
constexpr int kBuffers = 4, kMaxBlocks = 48 * 1024;
int range_tokens_of(const AttendIn& in, int n) {
  const int64_t token_bytes = n * (in.q.size(2) / in.k.size(2)) * in.v.size(3) * 2;
  const int64_t fit = std::max<int64_t>(kBufferBytes / token_bytes / 128 * 128, 128);
  return static_cast<int>(std::min(fit, in.q.size(1)));
}

template <int kDk, int kDv>
void launch_far(Context& ctx, const char* op, const FarArgs& a, int block_keys) {
  using Shape = FarShape<kDk, kDv>;
  const int key_tiles = (block_keys + kTileRows - 1) / kTileRows;
  const int key_buffers = std::min(Shape::kMaxBuffers, Shape::kKeyRoom / key_tiles);
  const int bytes = Shape::kStages * Shape::kRowBytes + key_buffers * key_tiles * Shape::kKeyBytes;
  launch(ctx, op, attend_far_kernel<kDk, kDv>, dim3(static_cast<unsigned>(ctx.num_sms)), dim3(Shape::kThreads), bytes,
         a);
}

}  // namespace

bool attend_far_blocks_sm90_applies(const Context& ctx, const AttendOut& out, const AttendIn& in,
                                    const ConstTensor& block_index, int64_t l_sel) {
  const auto far_rows = [](const ConstTensor& t) { return make_view<const bf16>(t).vector; };  // of 16-byte vectors
  const int64_t dk = in.q.size(3), dv = in.v.size(3), n = block_index.size(3);
  const bool widths = (dk == 64 && dv == 64) || (dk == 128 && dv == 128) || (dk == 192 && dv == 128);
  return ctx.compute_capability == 90 && in.q.dtype == DType::bf16 && widths && n <= 64 &&
         (l_sel == 32 || l_sel == 64 || l_sel == 128) && in.q.size(2) / in.k.size(2) <= 64 &&
         ceil_div(in.q.size(1), l_sel) <= kMaxBlocks && far_rows(in.q) && far_rows(in.k) && far_rows(in.v) &&
         far_rows(out.o) && in.q.size(1) * in.q.stride[1] / 8 < (int64_t{1} << 31);
}

void attend_far_blocks_sm90(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                            const BlockLists& lists, int block_keys) {
  const int64_t T = in.q.size(1), bgs = in.k.size(0) * in.k.size(2), G = in.q.size(2) / in.k.size(2);
  const int range_tokens = range_tokens_of(in, lists.n), piece_tokens = static_cast<int>(kItemTiles * kTileRows / G);
  const int merge_rows = 1024 * kMergeTurns / static_cast<int>(in.v.size(3));
  const int64_t ranges = ceil_div(T, range_tokens), steps = bgs * ranges;
  const int64_t entries = int64_t{range_tokens} * lists.n;
  const int64_t items = std::min<int64_t>(lists.blocks, entries) + entries / piece_tokens;
  Scratch::Scope scope(ctx.scratch);
  const auto ints = [&](int64_t count) { return scope.alloc(DType::i32, {count}).ptr<int32_t>(); };
  const FarArgs a{.q = make_view<const bf16>(in.q),
                  .k = make_view<const bf16>(in.k),
                  .v = make_view<const bf16>(in.v),
                  .o = make_view<bf16>(out.o),
                  .lse = make_view<float>(out.lse),
                  .lists = lists,
                  .n = Divisor(lists.n),
                  .heads = Divisor(static_cast<int>(G)),
                  .block_keys = Divisor(block_keys),
                  .scale_log2 = kLog2e / std::sqrt(static_cast<float>(in.q.size(3))),
                  .range_tokens = range_tokens,
                  .ranges = static_cast<int>(ranges),
                  .steps = static_cast<int>(steps),
                  .buffers = kBuffers,
                  .piece_tokens = piece_tokens,
                  .merge_rows = merge_rows,
                  .item_counts = ints(steps),
                  .items = reinterpret_cast<int4*>(ints(4 * steps * items)),
                  .entries = ints(steps * entries),
                  .items_stride = static_cast<int>(items),
                  .entries_stride = static_cast<int>(entries),
                  .starts = ints(steps + kLag + 1),
                  .gathered = ints(steps),
                  .merged = ints(steps),
                  .queue = ints(1),
                  .partial = scope.alloc(DType::bf16, {kBuffers * entries * G, in.v.size(3)}).ptr<bf16>(),
                  .partial_lse = scope.alloc(DType::f32, {kBuffers * entries * G}).ptr<float>()};
  launch(ctx, "index_range", index_range_kernel, dim3(static_cast<unsigned>(steps)), dim3(kIndexThreads),
         lists.blocks * sizeof(int), a);
  launch(ctx, "plan_steps", plan_steps_kernel, dim3(1), dim3(kIndexThreads), 0, a);
  if (in.q.size(3) == 64)
    launch_far<64, 64>(ctx, op, a, block_keys);
  else if (in.q.size(3) == 128)
    launch_far<128, 128>(ctx, op, a, block_keys);
  else
    launch_far<192, 128>(ctx, op, a, block_keys);
}

}  // namespace triad::cuda
