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
//   compare_lists_kernel whether neighbours' lists differ enough for all this; if not, the union tiles do every block
//   index_range_kernel   one CTA for each range of each (b, g): the entries (t, place) of its far blocks, by block; in
//                        a block in any order: each entry has its own slot, so no result depends on it. And near lists
//   plan_steps_kernel    where each range begins in the queue of items (a block and up to 16 tiles of its entries)
//   attend_far_kernel    persistent, a CTA for each SM. A warp (scout) takes items from the queue and looks up entries;
//                        two bring rows, keys and values (cp.async) into rings of stages; two or three warpgroups
//                        gather, a stage each; four warps merge ranges whose items are all done; one warp tells the
//                        other CTAs what is done. Whoever waits, waits for work that was taken before: no deadlock.
//
// The whole forward on an H200, random lists, n 16, l' 64: 2.21 ms at 1 x 65536 x 12 x 2 x 64 (floor 0.25), 21.9 at
// 1 x 65536 x 64 x 4 x 128 (2.7). Of it index + far blocks, measured apart in other ranges:
//   1 x 65536 x 12 x 2 x 64    0.06 + 1.82 (ranges of 2048 tokens, 3 buffers; predicted 0.7 for all)
//   1 x 8192 x 64 x 4 x 128    0.02 + 2.47 (512, 3)
//   1 x 65536 x 64 x 4 x 128   0.09 + 18.0 (512, 4 buffers: 163 MB of scratch; predicted 8 for all)
// An earlier build took for the first 0.56 ms to bring rows and keys alone and 1.07 to gather without merging. Larger
// ranges and more buffers help, so merging seems to hold up the ring; why it is slow was not profiled.
//
// L2 traffic of an entry of G rows: G * (dk read, dv written, dv read) * 2 bytes, 2.3 KB at G = 6 and d = 64, beside
// l' * (dk + dv) * 2 bytes for each block and range.
#include "kernels/nsa_attend_selected_sm90.cuh"

#include <algorithm>
#include <cmath>

#include "kernels/nsa_attend_selected_index_sm90.cuh"

namespace triad::cuda {
namespace {

// ---- gathering and merging ----

// What the loaders are told of a stage, some stages ahead.
struct StagePlan {
  int step, block;       // step -1: the end
  int tile, tiles;       // of the item
  int entries;           // of the item: tokens
  int kv, kv_parity;     // its buffer of keys and values, and the parity of its turn there
  int entry[kTileRows];  // by row
};
// What the gatherers are told.
struct StageWork {
  int step, kv, kv_parity, ends_item;
  int to[kTileRows];  // where row r's partial sum goes in its buffer; -1: there is no such row
};

__device__ __forceinline__ int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
// Waits until `target` items of the step are done; `known`: the last step of which that is known already.
__device__ __forceinline__ void await_step(const int* done, int step, int target, int& known) {
  if (step <= known) return;
  while (load_acquire(done + step) < target) __nanosleep(40);
  known = step;
}
__device__ __forceinline__ void add_release(int* p, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// Stages of rows and buffers of keys and values, as 227 KB allow; registers of the warpgroups, as 64 K allow.
template <int kDk, int kDv>
struct FarShape {
  static constexpr int kGatherers = kDv == 64 ? 3 : 2;
  static constexpr int kStages = kDk == 64 ? 6 : kDk == 128 ? 3 : 2;
  static constexpr int kRowBytes = kDk / kPanel * kPanelBytes;          // of a stage
  static constexpr int kOutBytes = kDv / kPanel * kPanelBytes;          // of a gatherer's o on its way out
  static constexpr int kKeyBytes = (kDk + kDv) / kPanel * kPanelBytes;  // of 64 keys and values
  // A merging warp has two units of some rows' partial sums from some of their list's places.
  static constexpr int kUnitRows = 256 / kDv, kUnitPlaces = kDv == 64 ? 16 : 8;
  static constexpr int kUnitBytes = kUnitRows * kUnitPlaces * kDv * 2, kMergeBytes = 4 * 2 * kUnitBytes;
  static constexpr int kKeyRoom = (212 * 1024 - kStages * kRowBytes - kGatherers * kOutBytes - kMergeBytes) / kKeyBytes;
  static constexpr int kMaxBuffers = 6;
  static constexpr int kThreads = (kGatherers + 2) * kWarpgroup;
  // A warpgroup may take what others of its CTA gave: all of them together have what the launch gave.
  static constexpr int kGatherRegisters = kDv == 64 ? 112 : 160, kMergeRegisters = kDv == 64 ? 80 : 104;
  static constexpr int kLoadRegisters = kDv == 64 ? 64 : 88;
  __host__ __device__ static constexpr int key_buffers(int key_tiles) {
    return kKeyRoom / key_tiles < kMaxBuffers ? kKeyRoom / key_tiles : kMaxBuffers;
  }
  static constexpr int shared_bytes(int key_tiles) {
    return kStages * kRowBytes + kGatherers * kOutBytes + kMergeBytes + key_buffers(key_tiles) * key_tiles * kKeyBytes;
  }
};

template <int kDk, int kDv>
struct Far {
  using Shape = FarShape<kDk, kDv>;
  static constexpr int kStages = Shape::kStages, kPanelsK = kDk / kPanel, kPanelsV = kDv / kPanel;

  const FarArgs& a;
  unsigned char *stages, *outs, *units, *keys;
  StagePlan* plans;
  StageWork* works;
  uint32_t barriers;  // pairs of full and empty: plans, works, keys; empty of stages, stored of works
  int key_tiles, key_buffers;

  static constexpr int kBarriers = 2 * kPlans + 3 * kWorks + 2 * Shape::kMaxBuffers + kStages;
  __device__ __forceinline__ uint32_t plan_full(int i) const { return barriers + 8 * i; }
  __device__ __forceinline__ uint32_t plan_empty(int i) const { return plan_full(kPlans + i); }
  __device__ __forceinline__ uint32_t full(int i) const { return plan_full(2 * kPlans + i); }
  __device__ __forceinline__ uint32_t stored(int i) const { return full(kWorks + i); }
  __device__ __forceinline__ uint32_t work_empty(int i) const { return full(2 * kWorks + i); }
  __device__ __forceinline__ uint32_t keys_full(int i) const { return full(3 * kWorks + i); }
  __device__ __forceinline__ uint32_t keys_empty(int i) const { return keys_full(Shape::kMaxBuffers + i); }
  __device__ __forceinline__ uint32_t stage_empty(int i) const { return keys_full(2 * Shape::kMaxBuffers + i); }
  __device__ __forceinline__ unsigned char* stage(int i) const { return stages + i * Shape::kRowBytes; }
  __device__ __forceinline__ unsigned char* key_buffer(int i) const { return keys + i * key_tiles * Shape::kKeyBytes; }

  // The warp that takes items from the queue and looks up their entries. It runs ahead of the loaders by a ring of
  // plans, so that none of the loads that lead to an address (ticket, item, entries: 700 clocks each) is waited for.
  __device__ __forceinline__ void scout() const {
    const int lane = threadIdx.x % 32, G = a.heads.value();
    int step = -1, begin = 0, end = 0;
    int ticket = lane == 0 ? atomicAdd(a.gather_queue, 1) : 0;
    // The next item of the queue, on its way from memory; afterwards `step` is its step, a.steps at the end.
    const auto take = [&]() -> int4 {
      const int at = __shfl_sync(kFullWarp, ticket, 0);
      ticket = lane == 0 ? atomicAdd(a.gather_queue, 1) : 0;
      while (at >= end) {
        if (++step == a.steps) return {};
        begin = end, end = a.starts[step + 1];
      }
      return __ldg(a.items + static_cast<int64_t>(step) * a.items_stride + at - begin);
    };
    int n = 0, n_items = 0;
    const auto open_plan = [&]() -> StagePlan& {
      barrier_wait(plan_empty(n % kPlans), (n / kPlans & 1) ^ 1);
      return plans[n % kPlans];
    };
    const auto close_plan = [&] {
      barrier_arrive_after_copies(plan_full(n % kPlans));
      barrier_arrive(plan_full(n % kPlans));
      ++n;
    };
    int4 item = take();
    for (int now = step; now < a.steps; ++n_items) {
      const int4 next = take();
      const int last = item.z - 1, tiles = (item.z * G + kTileRows - 1) / kTileRows;
      const int* const entries = a.entries + static_cast<int64_t>(now) * a.entries_stride + item.y;
      for (int tile = 0; tile < tiles; ++tile) {
        StagePlan& plan = open_plan();
        if (lane == 0) {
          plan.step = now, plan.block = item.x, plan.tile = tile, plan.tiles = tiles, plan.entries = item.z;
          plan.kv = n_items % key_buffers, plan.kv_parity = n_items / key_buffers & 1;
        }
#pragma unroll
        for (int r = lane; r < kTileRows; r += 32)
          copy_async_4(&plan.entry[r], entries + min(a.heads.quotient(tile * kTileRows + r), last), true);
        close_plan();
      }
      item = next, now = step;
    }
    for (int i = 0; i < Shape::kGatherers; ++i) {
      StagePlan& plan = open_plan();
      if (lane == 0) plan.step = -1, plan.tile = i;
      close_plan();
    }
  }

  // The warp that brings the stages' rows.
  __device__ __forceinline__ void load_rows() const {
    const int lane = threadIdx.x % 32, G = a.heads.value(), n_listed = a.n.value();
    const int q_row = static_cast<int>(a.q.row / 8), q_head = static_cast<int>(a.q.head / 8);  // in 16 bytes
    int known_merged = -1, ends = 0;
    for (int n = 0; ends < Shape::kGatherers; ++n) {
      barrier_wait(plan_full(n % kPlans), n / kPlans & 1);
      const StagePlan& plan = plans[n % kPlans];
      const int step = plan.step, tile = plan.tile, tiles = plan.tiles, entries = plan.entries;
      const int kv = plan.kv, kv_parity = plan.kv_parity;
      const int entry[2] = {plan.entry[lane], plan.entry[lane + 32]};
      __syncwarp();
      if (lane == 0) barrier_arrive(plan_empty(n % kPlans));

      const int i = n % kWorks, stage_at = n % kStages;
      StageWork& work = works[i];
      barrier_wait(work_empty(i), (n / kWorks & 1) ^ 1);
      if (step < 0) {
        if (lane == 0) work.step = step;
        ++ends;
      } else {
        const int bg = step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups;
        const int before = step - a.buffers;  // whose partial sums the buffer still holds
        if (before >= 0) await_step(a.merged, before, a.merge_items(before), known_merged);
        if (lane == 0) work.step = step, work.kv = kv, work.kv_parity = kv_parity, work.ends_item = tile + 1 == tiles;
        int from[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int row = tile * kTileRows + lane + 32 * j, in_list = a.heads.quotient(row), h = row - in_list * G;
          const int t = entry[j] >> 6;
          from[j] = t * q_row + h * q_head;
          work.to[lane + 32 * j] = in_list < entries ? (t * n_listed + (entry[j] & 63)) * G + h : -1;
        }
        barrier_wait(stage_empty(stage_at), (n / kStages & 1) ^ 1);
        load_query(a.q.at(b, a.first_token(step), g * G), from, stage(stage_at));
      }
      barrier_arrive_after_copies(full(i));
      barrier_arrive(full(i));
    }
  }

  // The warp that brings the items' keys and values.
  __device__ __forceinline__ void load_all_keys() const {
    const int lane = threadIdx.x % 32;
    for (int n = 0;; ++n) {
      barrier_wait(plan_full(n % kPlans), n / kPlans & 1);
      const StagePlan& plan = plans[n % kPlans];
      const int step = plan.step, block = plan.block, tile = plan.tile, tiles = plan.tiles;
      const int kv = plan.kv, kv_parity = plan.kv_parity;
      __syncwarp();
      if (lane == 0) barrier_arrive(plan_empty(n % kPlans));
      if (step < 0) return;
      if (tile > 0) continue;
      const int bg = step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups;
      barrier_wait(keys_empty(kv), kv_parity ^ 1);
      if (lane == 0) barrier_arrive(keys_empty(kv), 4 * (kItemTiles - tiles) + 1);
      load_keys(b, g, block, key_buffer(kv));
      barrier_arrive_after_copies(keys_full(kv));
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

  // A warpgroup that computes every Shape::kGatherers-th stage.
  __device__ __forceinline__ void gather_all(int gatherer) const {
    const int lane = threadIdx.x % 32;
    for (int n = gatherer;; n += Shape::kGatherers) {
      const int i = n % kWorks;
      barrier_wait(full(i), n / kWorks & 1);
      const StageWork& work = works[i];
      const bool ends = work.step < 0;
      if (!ends) {
        barrier_wait(keys_full(work.kv), work.kv_parity);
        fence_async_proxy();
        gather(work, n % kStages, outs + gatherer * Shape::kOutBytes);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(stored(i));
      if (ends) return;
    }
  }

  __device__ __forceinline__ void gather(const StageWork& work, int stage_at, unsigned char* out) const {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x % kWarpgroup / 32 * 16;
    const uint32_t q = tile_descriptor(shared_address(stage(stage_at)));
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
      if (lane == 0 && tile + 1 == key_tiles) barrier_arrive(stage_empty(stage_at));
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

    const int64_t buffer = a.buffer_row(work.step);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(kFullWarp, sum[i], 1);
      sum[i] += __shfl_xor_sync(kFullWarp, sum[i], 2);
      const int to = work.to[warp_row + fragment_row() + 8 * i];
      if (lane % 4 == 0 && to >= 0) a.partial_lse[buffer + to] = fmaf(top[i], a.scale_log2, __log2f(sum[i]));
      sum[i] = __frcp_rn(sum[i]);
    }
    const uint32_t staged = shared_address(out) + (warp_row + lane % 16) * kPanelRowBytes;
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
      const uint4 x = *reinterpret_cast<const uint4*>(out + column / 8 * kPanelBytes + swizzled(row, column % 8));
      if (to >= 0) *reinterpret_cast<uint4*>(a.partial + (buffer + to) * kDv + 8 * column) = x;
    }
  }

  // A warp that merges: a unit of rows (and of places in their lists, when they have many) after the other, the partial
  // sums of the next one on their way to shared memory while this one's are added up.
  struct Unit {
    int step, row0, place0;  // row0 in the range
  };
  // What a lane has loaded of a unit: lse of its (row, place) pairs in powers of 2, -inf where there is no far block;
  // of its row the near blocks' lse and 8 columns of their o.
  static constexpr int kUnitPairs = (Shape::kUnitRows * Shape::kUnitPlaces + 31) / 32;  // of a lane
  struct UnitFacts {
    float lse_log2[kUnitPairs], near_lse;
    uint4 near;
  };
  __device__ __forceinline__ void merge_all() const {
    const int lane = threadIdx.x % 32, G = a.heads.value();
    unsigned char* const buffers = units + threadIdx.x % kWarpgroup / 32 * 2 * Shape::kUnitBytes;
    const int of_range = (a.range_tokens * G + a.merge_rows - 1) / a.merge_rows;
    const int of_group = (a.ranges - 1) * of_range + a.merge_items(a.ranges - 1), groups = a.steps / a.ranges;
    int known_gathered = -1, ticket = lane == 0 ? atomicAdd(a.merge_queue, 1) : 0;
    Unit next{-1, 0, 0};
    int end_row = 0;
    // The unit after `next`; false at the end of all.
    const auto advance = [&]() -> bool {
      if ((next.place0 += Shape::kUnitPlaces) < a.n.value()) return true;
      next.place0 = 0;
      if ((next.row0 += Shape::kUnitRows) < end_row) return true;
      const int at = __shfl_sync(kFullWarp, ticket, 0), bg = at / of_group, in_group = at - bg * of_group;
      if (bg >= groups) return false;
      ticket = lane == 0 ? atomicAdd(a.merge_queue, 1) : 0;
      const int range = in_group / of_range;
      next.step = bg * a.ranges + range, next.row0 = (in_group - range * of_range) * a.merge_rows;
      end_row = min(next.row0 + a.merge_rows, a.tokens_of(next.step) * G);
      return true;
    };
    next.place0 = a.n.value();

    // `now` is added up, `coming` is loaded, of `next` the lists are looked up.
    float out[8], top = 0.0f, sum = 0.0f;
    UnitFacts facts, coming_facts;
    int listed[kUnitPairs], next_listed[kUnitPairs];
    Unit now{}, coming{};
    bool is_now = false, is_coming = false, is_next = advance();
    for (int turn = 0; is_now || is_coming || is_next; ++turn) {
      if (is_next) load_lists(next, next_listed);
      const int target = is_coming ? a.item_counts[coming.step] : 0;
      const bool in_time = coming.step <= known_gathered || load_acquire(a.gathered + coming.step) >= target;
      unsigned char* const to = buffers + turn % 2 * Shape::kUnitBytes;
      if (is_coming && in_time) coming_facts = load_unit(coming, listed, to);
      copy_async_commit();
      if (is_now) {
        copy_async_wait_group<1>();
        __syncwarp();
        add_unit(now, facts, buffers + (turn + 1) % 2 * Shape::kUnitBytes, out, top, sum);
        __syncwarp();
        const bool ends_item =
            !is_coming || (coming.place0 == 0 && (coming.step != now.step || coming.row0 % a.merge_rows == 0));
        if (ends_item && lane == 0)  // no release: it is about loads, and their values are in use
          asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(a.merged + now.step) : "memory");
      }
      if (is_coming && !in_time) {  // others may be waiting for what was just added: only now is there time to wait
        await_step(a.gathered, coming.step, target, known_gathered);
        coming_facts = load_unit(coming, listed, to);
        copy_async_commit();
      }
      if (is_coming) known_gathered = max(known_gathered, coming.step);
      now = coming, facts = coming_facts, is_now = is_coming;
      coming = next, is_coming = is_next;
#pragma unroll
      for (int i = 0; i < kUnitPairs; ++i) listed[i] = next_listed[i];
      is_next = is_next && advance();
    }
  }

  // Row of a unit: its token in the range and its head.
  __device__ __forceinline__ int2 unit_row(const Unit& u, int row) const {
    const int at = min(u.row0 + row, a.tokens_of(u.step) * a.heads.value() - 1), t = a.heads.quotient(at);
    return make_int2(t, at - t * a.heads.value());
  }

  __device__ __forceinline__ void load_lists(const Unit& u, int (&listed)[kUnitPairs]) const {
    const int bg = u.step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups, t0 = a.first_token(u.step);
#pragma unroll
    for (int i = 0; i < kUnitPairs; ++i) {
      const int pair = i * 32 + threadIdx.x % 32, place = u.place0 + pair % Shape::kUnitPlaces;
      const int t = t0 + unit_row(u, pair / Shape::kUnitPlaces % Shape::kUnitRows).x;
      listed[i] = place < a.n.value() ? __ldg(a.lists.at(b, t, g) + place) : -1;
    }
  }

  __device__ __forceinline__ UnitFacts load_unit(const Unit& u, const int (&listed)[kUnitPairs],
                                                 unsigned char* to) const {
    constexpr int kLanes = kDv / 8, kPlaces = Shape::kUnitPlaces;
    const int lane = threadIdx.x % 32, G = a.heads.value(), n = a.n.value();
    const int bg = u.step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups, t0 = a.first_token(u.step);
    const int64_t buffer = a.buffer_row(u.step);
    UnitFacts facts;
    unsigned fars[kUnitPairs];
#pragma unroll
    for (int i = 0; i < kUnitPairs; ++i) {
      const int pair = i * 32 + lane, place = u.place0 + pair % kPlaces;
      const int2 row = unit_row(u, pair / kPlaces % Shape::kUnitRows);
      const bool far = is_far(listed[i], a.block_keys.quotient(t0 + row.x));
      facts.lse_log2[i] = far ? __ldcg(a.partial_lse + buffer + (row.x * n + place) * G + row.y) : -INFINITY;
      fars[i] = __ballot_sync(kFullWarp, far);
    }
    const int2 row = unit_row(u, lane / kLanes);
    const int first_pair = lane / kLanes * kPlaces;
    facts.near_lse = *a.lse.at(b, t0 + row.x, g * G + row.y);
    facts.near = *reinterpret_cast<const uint4*>(a.o.at(b, t0 + row.x, g * G + row.y) + 8 * (lane % kLanes));
    unsigned far = fars[0];
#pragma unroll
    for (int i = 1; i < kUnitPairs; ++i)
      if (first_pair / 32 == i) far = fars[i];
    far >>= first_pair % 32;
    const bf16* const partial = a.partial + (buffer + (row.x * n + u.place0) * G + row.y) * kDv + 8 * (lane % kLanes);
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {  // zeros where there is no partial sum
      const bool is_there = far >> j & 1;
      copy_async_16(to + (j * 32 + lane) * 16, is_there ? partial + j * G * kDv : partial, is_there ? 16 : 0);
    }
    return facts;
  }

  __device__ __forceinline__ void add_unit(const Unit& u, const UnitFacts& facts, const unsigned char* from,
                                           float (&out)[8], float& top, float& sum) const {
    constexpr int kLanes = kDv / 8, kPlaces = Shape::kUnitPlaces;
    const int lane = threadIdx.x % 32, row_of_unit = lane / kLanes, first_pair = row_of_unit * kPlaces;
    if (u.place0 == 0) {
      top = facts.near_lse * kLog2e, sum = top == -INFINITY ? 0.0f : 1.0f;
      load_bf16(out, facts.near);
    }
    // The lanes that hold the pairs of a row find its largest lse, weigh them and add the weights.
    float weights[kUnitPairs], best = top, added = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnitPairs; ++i) {
      float x = facts.lse_log2[i];
#pragma unroll
      for (int by = 1; by < kPlaces; by *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, by));
      const float of_row = __shfl_sync(kFullWarp, x, first_pair % 32);
      if (first_pair / 32 == i) best = fmaxf(best, of_row);
    }
    const float base = best == -INFINITY ? 0.0f : best, shrink = exp2_approx(top - base);
#pragma unroll
    for (int i = 0; i < kUnitPairs; ++i) {
      const int row_of_pair = (i * 32 + lane) / kPlaces % Shape::kUnitRows;
      weights[i] = exp2_approx(facts.lse_log2[i] - __shfl_sync(kFullWarp, base, row_of_pair * kLanes));
      float x = weights[i];
#pragma unroll
      for (int by = 1; by < kPlaces; by *= 2) x += __shfl_xor_sync(kFullWarp, x, by);
      const float of_row = __shfl_sync(kFullWarp, x, first_pair % 32);
      if (first_pair / 32 == i) added = of_row;
    }
    top = best, sum = fmaf(sum, shrink, added);
#pragma unroll
    for (int c = 0; c < 8; ++c) out[c] *= shrink;
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      float weight = 0.0f;
#pragma unroll
      for (int i = 0; i < kUnitPairs; ++i) {
        const float x = __shfl_sync(kFullWarp, weights[i], (first_pair + j) % 32);
        if (first_pair / 32 == i) weight = x;
      }
      float values[8];
      load_bf16(values, *reinterpret_cast<const uint4*>(from + (j * 32 + lane) * 16));
#pragma unroll
      for (int c = 0; c < 8; ++c) out[c] = fmaf(weight, values[c], out[c]);
    }
    if (u.place0 + kPlaces < a.n.value()) return;
    const int bg = u.step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups, G = a.heads.value();
    if (u.row0 + row_of_unit >= a.tokens_of(u.step) * G) return;
    const int2 row = unit_row(u, row_of_unit);
    const int t = a.first_token(u.step) + row.x, h = g * G + row.y;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    *reinterpret_cast<uint4*>(a.o.at(b, t, h) + 8 * (lane % kLanes)) =
        make_uint4(pack_bf16(out[0] * inverse, out[1] * inverse), pack_bf16(out[2] * inverse, out[3] * inverse),
                   pack_bf16(out[4] * inverse, out[5] * inverse), pack_bf16(out[6] * inverse, out[7] * inverse));
    if (lane % kLanes == 0) *a.lse.at(b, t, h) = sum == 0.0f ? -INFINITY : (top + log2f(sum)) * 0.6931471805599453f;
  }
  static __device__ __forceinline__ void load_bf16(float (&x)[8], const uint4& u) {
    const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }

  // The warp that tells the other CTAs of items whose stores can be seen: what the others wrote before they arrived is
  // covered by its release.
  __device__ __forceinline__ void report() const {
    for (int n = 0;; ++n) {
      const int i = n % kWorks;
      barrier_wait(stored(i), n / kWorks & 1);
      const int step = works[i].step, ends_item = works[i].ends_item;
      __syncwarp();
      if (step < 0) return;
      if (threadIdx.x % 32 == 0) {
        barrier_arrive(work_empty(i));
        if (ends_item) add_release(a.gathered + step, 1);
      }
    }
  }
};

template <int kDk, int kDv>
__global__ void __launch_bounds__(FarShape<kDk, kDv>::kThreads, 1)
    attend_far_kernel(const __grid_constant__ FarArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the PTX for older cards holds an empty kernel, which is not chosen there
  if (*a.differ == 0) return;
  using Shape = FarShape<kDk, kDv>;
  __shared__ StagePlan plans[kPlans];
  __shared__ StageWork works[kWorks];
  __shared__ __align__(8) uint64_t barriers[Far<kDk, kDv>::kBarriers];
  unsigned char* const stages = aligned_shared();
  unsigned char* const outs = stages + Shape::kStages * Shape::kRowBytes;
  const int key_tiles = (a.block_keys.value() + kTileRows - 1) / kTileRows, key_buffers = Shape::key_buffers(key_tiles);
  unsigned char* const units = outs + Shape::kGatherers * Shape::kOutBytes;
  const Far<kDk, kDv> far{
      a,         stages,     outs, units, units + Shape::kMergeBytes, plans, works, shared_address(barriers),
      key_tiles, key_buffers};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPlans; ++i) barrier_init(far.plan_full(i), 64), barrier_init(far.plan_empty(i), 2);
    for (int i = 0; i < kWorks; ++i) {
      barrier_init(far.full(i), 64);  // of each lane one for its copies and one for what it stored itself
      barrier_init(far.stored(i), 4);
      barrier_init(far.work_empty(i), 1);
    }
    for (int i = 0; i < Shape::kStages; ++i) barrier_init(far.stage_empty(i), 4);
    for (int i = 0; i < Shape::kMaxBuffers; ++i) {
      barrier_init(far.keys_full(i), 32);
      barrier_init(far.keys_empty(i), 4 * kItemTiles + 1);  // the loader arrives for the tiles that an item lacks
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (a.block_keys.value() % kTileRows != 0)  // values past the block's end weigh 0, if they are numbers
    for (int i = threadIdx.x; i < key_buffers * key_tiles * Shape::kKeyBytes / 16; i += Shape::kThreads)
      reinterpret_cast<uint4*>(far.keys)[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup, warp = threadIdx.x % kWarpgroup / 32;
  if (warpgroup < Shape::kGatherers) {
    take_registers<Shape::kGatherRegisters>();
    far.gather_all(warpgroup);
  } else if (warpgroup == Shape::kGatherers) {
    give_registers<Shape::kMergeRegisters>();
    far.merge_all();
  } else {
    give_registers<Shape::kLoadRegisters>();
    if (warp == 0)
      far.load_rows();
    else if (warp == 1)
      far.load_all_keys();
    else if (warp == 2)
      far.scout();
    else
      far.report();
  }
#endif
}

// Ranges of so many tokens that their partial sums take about kBufferBytes, and a few buffers of them.
constexpr int64_t kBufferBytes = 32 << 20;
constexpr int kBuffers = 3, kMaxBlocks = 48 * 1024;

// How many times a list is the union of the lists that the 64 rows of a union tile share, if far blocks are drawn at
// random from the middle of the sequence: KERNELS.md 4.2.
double random_union(int64_t tokens, int64_t block_keys, int64_t n, int64_t heads) {
  const double far = static_cast<double>(std::max<int64_t>(n - kNear, 0));
  const double blocks = std::max(static_cast<double>(tokens) / (2.0 * static_cast<double>(block_keys)), far + 1);
  const double in_union = blocks * (1 - std::pow(1 - far / blocks, std::max(64.0 / static_cast<double>(heads), 1.0)));
  return (kNear + in_union) / static_cast<double>(n);
}
// From which union on this route pays. Random lists at T = 65536 on an H200: 2.2 ms by this route with 12 heads of 64,
// where union tiles of 6.9 lists took 4.7; 21.9 ms with 64 heads of 128, where they, of 3.2 lists, took 25.2.
double union_limit(int64_t dk) { return dk == 64 ? 3.4 : 2.7; }
// The lists are compared at all only where random ones would pass the limit clearly: at T = 8192 and 12 heads of 64,
// where they would by a tenth, a training step's selected forward took 6.5 ms with the comparison, 5.7 without.
constexpr double kWorthComparing = 1.2;
int range_tokens_of(const AttendIn& in, int n) {
  const int64_t token_bytes = n * (in.q.size(2) / in.k.size(2)) * in.v.size(3) * 2;
  const int64_t fit = std::clamp<int64_t>(kBufferBytes / token_bytes / 128 * 128, 128, 4096);
  return static_cast<int>(std::min(fit, in.q.size(1)));
}

template <int kDk, int kDv>
void launch_far(Context& ctx, const char* op, const FarArgs& a, int block_keys) {
  using Shape = FarShape<kDk, kDv>;
  const int bytes = Shape::shared_bytes((block_keys + kTileRows - 1) / kTileRows);
  launch(ctx, op, attend_far_kernel<kDk, kDv>, dim3(static_cast<unsigned>(ctx.num_sms)), dim3(Shape::kThreads), bytes,
         a);
}

}  // namespace

bool attend_blocks_sm90_applies(const Context& ctx, const AttendOut& out, const AttendIn& in,
                                const ConstTensor& block_index, int64_t l_sel) {
  const auto far_rows = [](const ConstTensor& t) { return make_view<const bf16>(t).vector; };  // of 16-byte vectors
  const int64_t dk = in.q.size(3), dv = in.v.size(3), n = block_index.size(3);
  const bool widths = (dk == 64 && dv == 64) || (dk == 128 && dv == 128) || (dk == 192 && dv == 128);
  return ctx.compute_capability == 90 && in.q.dtype == DType::bf16 && widths && n <= 64 &&
         (l_sel == 32 || l_sel == 64 || l_sel == 128) && in.q.size(2) / in.k.size(2) <= 64 &&
         ceil_div(in.q.size(1), l_sel) <= kMaxBlocks && far_rows(in.q) && far_rows(in.k) && far_rows(in.v) &&
         far_rows(out.o) && in.q.size(1) * in.q.stride[1] / 8 < (int64_t{1} << 31) &&
         random_union(in.q.size(1), l_sel, n, in.q.size(2) / in.k.size(2)) > kWorthComparing * union_limit(dk);
}

void attend_blocks_forward_sm90(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                                const ConstTensor& block_index, int64_t l_sel,
                                const std::function<void(const ConstTensor& lists)>& attend_near) {
  const int64_t T = in.q.size(1), bgs = in.k.size(0) * in.k.size(2), G = in.q.size(2) / in.k.size(2);
  const int n = static_cast<int>(block_index.size(3)), block_keys = static_cast<int>(l_sel);
  const int range_tokens = range_tokens_of(in, n), piece_tokens = static_cast<int>(kItemTiles * kTileRows / G);
  const int64_t ranges = ceil_div(T, range_tokens), steps = bgs * ranges, blocks = ceil_div(T, l_sel);
  const int64_t entries = int64_t{range_tokens} * n;
  const int64_t items = std::min(blocks, entries) + entries / piece_tokens;
  Scratch::Scope scope(ctx.scratch);
  const auto ints = [&](int64_t count) { return scope.alloc(DType::i32, {count}).ptr<int32_t>(); };
  const Tensor near = scope.alloc(DType::i32, {in.q.size(0), T, in.k.size(2), n});
  const FarArgs a{
      .q = make_view<const bf16>(in.q),
      .k = make_view<const bf16>(in.k),
      .v = make_view<const bf16>(in.v),
      .o = make_view<bf16>(out.o),
      .lse = make_view<float>(out.lse),
      .lists = {block_index.ptr<int32_t>(), block_index.stride[0], block_index.stride[1], block_index.stride[2],
                static_cast<int>(T), static_cast<int>(in.k.size(2)), static_cast<int>(blocks)},
      .n = Divisor(n),
      .heads = Divisor(static_cast<int>(G)),
      .block_keys = Divisor(block_keys),
      .scale_log2 = kLog2e / std::sqrt(static_cast<float>(in.q.size(3))),
      .range_tokens = range_tokens,
      .ranges = static_cast<int>(ranges),
      .steps = static_cast<int>(steps),
      .buffers = kBuffers,
      .piece_tokens = piece_tokens,
      .merge_rows = kUnitsAtOnce * (in.v.size(3) == 64 ? 4 : 2),
      .tile_tokens = static_cast<int>(std::max<int64_t>(64 / G, 1)),
      .union_limit = static_cast<float>(union_limit(in.q.size(3))),
      .differ = ints(1),
      .near = near.ptr<int32_t>(),
      .item_counts = ints(steps),
      .items = reinterpret_cast<int4*>(ints(4 * steps * items)),
      .entries = ints(steps * entries),
      .items_stride = static_cast<int>(items),
      .entries_stride = static_cast<int>(entries),
      .starts = ints(steps + 1),
      .gathered = ints(steps),
      .merged = ints(steps),
      .gather_queue = ints(1),
      .merge_queue = ints(1),
      .partial = scope.alloc(DType::bf16, {kBuffers * entries * G, in.v.size(3)}).ptr<bf16>(),
      .partial_lse = scope.alloc(DType::f32, {kBuffers * entries * G}).ptr<float>()};
  launch(ctx, "compare_lists", compare_lists_kernel, dim3(1), dim3(kIndexThreads),
         kIndexThreads / 32 * ceil_div(blocks, 32) * sizeof(int), a);
  launch(ctx, "index_range", index_range_kernel, dim3(static_cast<unsigned>(steps)), dim3(kIndexThreads),
         blocks * sizeof(int), a);
  launch(ctx, "plan_steps", plan_steps_kernel, dim3(1), dim3(kIndexThreads), 0, a);
  attend_near(near);
  if (in.q.size(3) == 64)
    launch_far<64, 64>(ctx, op, a, block_keys);
  else if (in.q.size(3) == 128)
    launch_far<128, 128>(ctx, op, a, block_keys);
  else
    launch_far<192, 128>(ctx, op, a, block_keys);
}

}  // namespace triad::cuda
