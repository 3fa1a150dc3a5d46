// The selected branch on the GPU, on the general kernels of nsa_attend_rows.cuh and nsa_attend.cu.
//
// Forward and dq: 64 rows share the union of their tokens' lists. Each warp merges the (up to 64) sorted lists for
// itself: a lane follows two of them, the next block is the minimum over the warp, a ballot tells which tokens listed
// it. Warps skip blocks that none of their rows listed. Work: the union for the loads, about the union of 16 rows for
// the products.
//
// Where neighbouring lists differ, the union is much longer than a list. On Hopper long sequences therefore take only
// the near blocks (nsa_attend_selected_sm90.cuh) this way, and the far ones from the side of the blocks.
//
// dk and dv need the lists by block: an inverse index, in scratch linear in T, ascending, so that sums come out with
// the same bits each time:
//   count_entries_kernel   how many tokens of each part of the sequence (a multiple of 1024) list a block
//   plan_work_kernel       one CTA for each (b, g): prefix sums of the counts, and the pieces of at most kWorkTokens
//                          tokens, so that block 0, which every token lists, does not become one CTA's work
//   fill_index_kernel      the tokens of each block, ascending: a CTA turns the lists of 1024 tokens into a matrix of
//                          bits (block, token) in shared memory, and a warp reads a block's bits in order
#include "kernels/nsa_attend_selected.h"

#include <climits>

#include "kernels/nsa_attend.cuh"
#include "kernels/nsa_attend_rows.cuh"
#include "kernels/nsa_attend_rows_sm90.cuh"
#include "kernels/nsa_attend_selected_sm90.cuh"

namespace triad::cuda {
namespace {

struct SelectedKeys {
  KeyRange range;
  BlockLists lists;
  Divisor block_keys;
  bool near_only;  // leave out the blocks that nsa_attend_selected_sm90.cuh calls far

  class Walk {
   public:
    __device__ __forceinline__ Walk(const SelectedKeys& keys, const RowTile& rows)
        : block_keys_(keys.block_keys.value()), n_(keys.lists.n), end_of_sight_(rows.last_token + 1) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = rows.first_token + static_cast<int>(threadIdx.x % 32) + 32 * i;
        const bool exists = t <= rows.last_token;
        list_[i] = exists ? keys.lists.at(rows.b, t, rows.g) : nullptr;
        at_[i] = exists ? -1 : n_;
        far_until_[i] = keys.near_only && exists ? keys.block_keys.quotient(t) : 0;
        advance(i);
      }
    }
    __device__ __forceinline__ bool next(KeyTile& tile, int most) {
      while (first_ >= end_) {  // the next block that any token listed
        const int block = __reduce_min_sync(kFullWarp, min(block_[0], block_[1]));
        if (block == INT_MAX) return false;
        const uint64_t low = __ballot_sync(kFullWarp, block_[0] == block);
        const uint64_t high = __ballot_sync(kFullWarp, block_[1] == block);
        members_ = high << 32 | low;
        for (int i = 0; i < 2; ++i)
          if (block_[i] == block) advance(i);
        first_ = block * block_keys_;
        end_ = min(first_ + block_keys_, end_of_sight_);
      }
      tile = {first_, min(first_ + most, end_), members_};
      first_ += most;
      return true;
    }

   private:
    __device__ __forceinline__ void advance(int i) {
      int block;
      do block = ++at_[i] < n_ ? list_[i][at_[i]] : -1;
      while (is_far(block, far_until_[i]));
      block_[i] = block < 0 ? INT_MAX : block;  // -1 ends a list
    }
    int block_keys_, n_, end_of_sight_;
    const int* list_[2];
    int at_[2], block_[2], far_until_[2];
    int first_ = 0, end_ = 0;  // what is left of the current block
    uint64_t members_ = 0;
  };
};

// ---- the inverse index ----

constexpr int kStepTokens = 1024, kMaxParts = 64;
constexpr int kFillThreads = 512, kFillBlocks = 512;  // blocks of one CTA
constexpr int kFillStride = kStepTokens / 32 + 1;     // words of a block's bits: odd, against bank conflicts
constexpr int kScanThreads = 1024;

struct Index {
  BlockLists lists;
  Divisor n;
  int parts, part_tokens;  // a multiple of kStepTokens
  int64_t capacity;        // entries of one (b, g): T * n
  int* part_counts;        // [B*Hkv, parts, blocks] counts; after plan_work where the part's tokens begin in `tokens`
  int* tokens;             // [B*Hkv, capacity]
  KeyWork* work;           // [pieces, B*Hkv]
  int2* block_slots;       // [B*Hkv, blocks]
  int pieces, slots;       // capacities of one (b, g)
  __device__ __forceinline__ int* counts(int bg, int part) const {
    return part_counts + (static_cast<int64_t>(bg) * parts + part) * lists.blocks;
  }
};

// f(token - t0, block) for what the tokens [t0, t0 + count) list, several loads at once.
template <class F>
__device__ __forceinline__ void for_entries(const Index& index, int bg, int t0, int count, F&& f) {
  constexpr int kAtOnce = 8;
  const BlockLists& lists = index.lists;
  const int b = bg / lists.groups, g = bg % lists.groups, entries = count * lists.n;
  for (int e0 = threadIdx.x; e0 < entries; e0 += kAtOnce * kFillThreads) {
    int row[kAtOnce], block[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int e = e0 + u * kFillThreads;
      row[u] = index.n.quotient(e);
      block[u] = e < entries ? lists.at(b, t0 + row[u], g)[e - row[u] * lists.n] : -1;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (block[u] >= 0) f(row[u], block[u]);
  }
}

// A CTA: one part's entries for the blocks block0 .. block0 + kFillBlocks - 1.
__global__ void __launch_bounds__(kFillThreads) count_entries_kernel(const Index index) {
  __shared__ int counts[kFillBlocks];
  const int part = blockIdx.x % index.parts, block0 = blockIdx.x / index.parts * kFillBlocks, bg = blockIdx.y;
  const int begin = part * index.part_tokens, end = min(begin + index.part_tokens, index.lists.tokens);
  counts[threadIdx.x] = 0;
  __syncthreads();
  for_entries(index, bg, begin, end - begin, [&](int, int block) {
    const unsigned in_chunk = block - block0;
    if (in_chunk < kFillBlocks) atomicAdd(&counts[in_chunk], 1);
  });
  __syncthreads();
  const int block = block0 + threadIdx.x;
  if (block < index.lists.blocks) index.counts(bg, part)[block] = counts[threadIdx.x];
}
static_assert(kFillBlocks == kFillThreads);

struct WorkSum {
  int tokens, pieces, slots;
  __device__ __forceinline__ WorkSum operator+(const WorkSum& o) const {
    return {tokens + o.tokens, pieces + o.pieces, slots + o.slots};
  }
};
__device__ __forceinline__ WorkSum shuffle_up(const WorkSum& s, int by) {
  return {__shfl_up_sync(kFullWarp, s.tokens, by), __shfl_up_sync(kFullWarp, s.pieces, by),
          __shfl_up_sync(kFullWarp, s.slots, by)};
}

// The sum of `mine` over the threads before this one; `total` is that over all threads.
__device__ __forceinline__ WorkSum exclusive_scan(const WorkSum& mine, WorkSum& total) {
  __shared__ WorkSum warp_sums[kScanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan_warp = [&](WorkSum sum) {
    for (int by = 1; by < 32; by *= 2) {
      const WorkSum before = shuffle_up(sum, by);
      if (lane >= by) sum = sum + before;
    }
    return sum;
  };
  const WorkSum in_warp = scan_warp(mine);
  if (lane == 31) warp_sums[warp] = in_warp;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = scan_warp(warp_sums[lane]);
  __syncthreads();
  total = warp_sums[kScanThreads / 32 - 1];
  const WorkSum before = warp > 0 ? warp_sums[warp - 1] : WorkSum{};
  __syncthreads();  // warp_sums is free for the next call
  return {before.tokens + in_warp.tokens - mine.tokens, before.pieces + in_warp.pieces - mine.pieces,
          before.slots + in_warp.slots - mine.slots};
}

__global__ void __launch_bounds__(kScanThreads) plan_work_kernel(const Index index) {
  const int bg = blockIdx.x, blocks = index.lists.blocks;
  WorkSum done{};
  for (int block0 = 0; block0 < blocks; block0 += kScanThreads) {
    const int block = block0 + threadIdx.x;
    const bool exists = block < blocks;
    int tokens = 0;
#pragma unroll 8
    for (int part = 0; part < index.parts; ++part) tokens += exists ? index.counts(bg, part)[block] : 0;
    const int pieces =
        exists ? max(1, (tokens + kWorkTokens - 1) / kWorkTokens) : 0;  // at least one: it writes the zeros
    WorkSum total;
    const WorkSum at = done + exclusive_scan({tokens, pieces, pieces > 1 ? pieces : 0}, total);
    done = done + total;
    if (!exists) continue;
    int first = at.tokens;
#pragma unroll 8
    for (int part = 0; part < index.parts; ++part) {
      int& count = index.counts(bg, part)[block];
      const int begin = first;
      first += count;
      count = begin;
    }
    const int slot0 = bg * index.slots + at.slots;
    index.block_slots[static_cast<int64_t>(bg) * blocks + block] = make_int2(slot0, pieces);
    for (int i = 0; i < pieces; ++i)
      index.work[static_cast<int64_t>(at.pieces + i) * gridDim.x + bg] = {
          block, at.tokens + i * kWorkTokens, min(kWorkTokens, tokens - i * kWorkTokens), pieces > 1 ? slot0 + i : -1};
  }
  for (int i = done.pieces + threadIdx.x; i < index.pieces; i += kScanThreads)
    index.work[static_cast<int64_t>(i) * gridDim.x + bg] = {0, 0, -1, -1};
}

// A CTA writes the tokens of one part that list the blocks block0 .. block0 + kFillBlocks - 1.
__global__ void __launch_bounds__(kFillThreads) fill_index_kernel(const Index index) {
  unsigned* const bits = reinterpret_cast<unsigned*>(dynamic_shared());  // [kFillBlocks][kFillStride]
  __shared__ int next[kFillBlocks];                                      // where a block's next token goes
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = blockIdx.x % index.parts, block0 = blockIdx.x / index.parts * kFillBlocks, bg = blockIdx.y;
  const int begin = part * index.part_tokens, end = min(begin + index.part_tokens, index.lists.tokens);
  const int blocks = min(index.lists.blocks - block0, kFillBlocks);
  int* const out = index.tokens + bg * index.capacity;
  if (static_cast<int>(threadIdx.x) < blocks) next[threadIdx.x] = index.counts(bg, part)[block0 + threadIdx.x];
  for (int t0 = begin; t0 < end; t0 += kStepTokens) {
    for (int i = threadIdx.x; i < blocks * kFillStride; i += kFillThreads) bits[i] = 0;
    __syncthreads();
    for_entries(index, bg, t0, min(kStepTokens, end - t0), [&](int row, int block) {
      const unsigned in_chunk = block - block0;
      if (in_chunk < kFillBlocks) atomicOr(&bits[in_chunk * kFillStride + row / 32], 1u << row % 32);
    });
    __syncthreads();
    for (int i = warp; i < blocks; i += kFillThreads / 32) {
      unsigned listed = bits[i * kFillStride + lane];
      int before = __popc(listed);
      for (int by = 1; by < 32; by *= 2) {
        const int x = __shfl_up_sync(kFullWarp, before, by);
        if (lane >= by) before += x;
      }
      int to = next[i] + before - __popc(listed);
      for (; listed != 0; listed &= listed - 1) out[to++] = t0 + 32 * lane + __ffs(listed) - 1;
      __syncwarp();
      if (lane == 31) next[i] += before;
    }
    __syncthreads();
  }
}

SelectedKeys selected_keys(const char* op, const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  const int64_t T = in.q.size(1), n = block_index.size(3);
  TRIAD_CHECK(T * n < (int64_t{1} << 31), "{}: T = {} times n = {} does not fit 31 bits", op, T, n);
  const auto tokens = static_cast<int>(T), block = static_cast<int>(std::min(l_sel, T));  // one block of T: all tokens
  return {
      .range = {.window = tokens, .l = 1, .d = 1, .keys = tokens},
      .lists = {block_index.ptr<int32_t>(), block_index.stride[0], block_index.stride[1], block_index.stride[2],
                static_cast<int>(n), tokens, static_cast<int>(in.k.size(2)), static_cast<int>(ceil_div(tokens, block))},
      .block_keys = Divisor(block),
      .near_only = false};
}

// Whether the blocks' side is the cheaper one: a pure function of the problem, since the lists are known to the card
// only.
bool far_blocks_pay(const AttendIn& in, int n, int block_keys) {
  const int64_t blocks = in.q.size(1) / block_keys;
  return blocks >= 4 * n;
}

}  // namespace

void nsa_attend_selected_forward(Context& ctx, const AttendOut& out, const AttendIn& in, ConstTensor block_index,
                                 int64_t l_sel) {
  const char* op = "nsa_attend_selected_forward";
  SelectedKeys keys = selected_keys(op, in, block_index, l_sel);
  const int block_keys = static_cast<int>(std::min(l_sel, in.q.size(1)));
  keys.near_only =
      attend_far_blocks_sm90_applies(ctx, out, in, block_index, l_sel) && far_blocks_pay(in, keys.lists.n, block_keys);
  attend_rows_forward(ctx, op, out, in, keys);
  if (keys.near_only) attend_far_blocks_sm90(ctx, op, out, in, keys.lists, block_keys);
}

void nsa_attend_selected_backward(Context& ctx, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                                  ConstTensor block_index, int64_t l_sel) {
  const char* op = "nsa_attend_selected_backward";
  const SelectedKeys keys = selected_keys(op, in, block_index, l_sel);
  const int block_keys = static_cast<int>(std::min(l_sel, in.q.size(1)));
  const bool hopper = attend_sm90_applies(ctx, out, grad, in);
  Scratch::Scope facts_scope(ctx.scratch);
  const Tensor facts = hopper ? compute_row_facts(ctx, facts_scope, grad, in) : Tensor{};
  if (hopper)
    attend_rows_backward_sm90(ctx, op, out, grad, in, keys, facts);
  else
    attend_rows_backward(ctx, op, out, grad, in, keys);

  // Of `capacity` entries at most capacity / kWorkTokens pieces are full; each block adds one that is not, and needs a
  // slot for it only when it has a full one too.
  const BlockLists& lists = keys.lists;
  const int64_t bgs = in.k.size(0) * in.k.size(2), blocks = lists.blocks;
  const int64_t capacity = in.q.size(1) * lists.n, full = capacity / kWorkTokens;
  const int64_t pieces = full + blocks, slots = full + std::min(full, blocks);
  TRIAD_CHECK(bgs * pieces < (int64_t{1} << 31), "{}: {} pieces of work do not fit 31 bits", op, bgs * pieces);
  Scratch::Scope scope(ctx.scratch);
  const int64_t part_tokens = ceil_div(ceil_div(in.q.size(1), kMaxParts), kStepTokens) * kStepTokens;
  const int64_t parts = ceil_div(in.q.size(1), part_tokens);
  const Tensor counts = scope.alloc(DType::i32, {bgs, parts, blocks});
  const Tensor tokens = scope.alloc(DType::i32, {bgs, capacity});
  const Tensor work = scope.alloc(DType::i32, {pieces, bgs, sizeof(KeyWork) / sizeof(int)});
  const Tensor block_slots = scope.alloc(DType::i32, {bgs, blocks, 2});
  Index index{.lists = lists,
              .n = Divisor(lists.n),
              .parts = static_cast<int>(parts),
              .part_tokens = static_cast<int>(part_tokens),
              .capacity = capacity,
              .part_counts = counts.ptr<int32_t>(),
              .tokens = tokens.ptr<int32_t>(),
              .work = reinterpret_cast<KeyWork*>(work.data),
              .block_slots = reinterpret_cast<int2*>(block_slots.data),
              .pieces = static_cast<int>(pieces),
              .slots = static_cast<int>(slots)};
  const auto grid_y = static_cast<unsigned>(bgs);
  const dim3 fill_grid(static_cast<unsigned>(ceil_div(blocks, kFillBlocks) * parts), grid_y);
  launch(ctx, "count_entries", count_entries_kernel, fill_grid, dim3(kFillThreads), 0, index);
  launch(ctx, "plan_work", plan_work_kernel, dim3(grid_y), dim3(kScanThreads), 0, index);
  const size_t bits_bytes = std::min<int64_t>(blocks, kFillBlocks) * kFillStride * sizeof(unsigned);
  launch(ctx, "fill_index", fill_index_kernel, fill_grid, dim3(kFillThreads), bits_bytes, index);

  KeyWorkList list{.block_keys = block_keys,
                   .blocks = lists.blocks,
                   .pieces = static_cast<int>(pieces),
                   .work = index.work,
                   .tokens = index.tokens,
                   .tokens_stride = capacity,
                   .block_slots = index.block_slots,
                   .partial = nullptr};
  if (slots > 0) {
    const int64_t width = in.k.size(3) + in.v.size(3);
    list.partial = scope.alloc(DType::f32, {bgs * slots, block_keys, width}).ptr<float>();
  }
  if (hopper)
    attend_key_gradients_sm90(ctx, op, out, grad, in, keys.range, list, facts);
  else
    attend_key_gradients(ctx, op, out, grad, in, keys.range, list);
}

}  // namespace triad::cuda
