// Builds the selected branch's inverse index: for each key block the tokens that list it. The kernels for dk and dv
// read it, cut into pieces of work (KeyWorkList). Scratch is linear in T, and the result is deterministic. Three
// kernels:
//   index_count_kernel: counts, for each part of a sequence and each block, the part's tokens that list the block. Its
//       atomics add integers, so their order does not matter.
//   index_plan_kernel, one CTA per sequence and group: computes, by prefix sums over the counts, where each block's
//       tokens begin in the index, and cuts them into pieces, at most most_tokens tokens each. Many CTAs thereby share
//       block 0, which every token lists.
//   index_fill_kernel: writes each block's tokens, ascending. Each warp first counts, for each block, how many of the
//       warp's tokens list the block. For a block, the warp's tokens go to the place where the part's tokens for that
//       block begin, plus the counts from the warps before.
// The KV-stationary forward has a different index (nsa/sm90/kv_stationary_index.cuh). Here a block's tokens are summed
// in index order, so it must be fixed, and every block has a piece of work. There the order is arbitrary, since each
// token adds its partial sums in list order; it has the far blocks only, and it also finds the entry for each place in
// a list.
#include <algorithm>

#include "kernels/common/tile_mma.cuh"
#include "kernels/nsa/gpu/block_scan.cuh"
#include "kernels/nsa/gpu/branch.cuh"
#include "kernels/nsa/gpu/key_work_bounds.h"

namespace triad::cuda {
namespace {

constexpr int kFillWarps = 32, kFillBlocks = 256;  // warps and blocks per CTA in index_fill_kernel
constexpr int kScanThreads = 1024;                 // threads per CTA in index_count_kernel and index_plan_kernel

// The three kernels' arguments. Scratch tables have a part for each sequence and group, bg = b * Hkv + g.
struct InverseIndex {
  BlockLists lists;
  Divisor n;               // entries per list
  Divisor block_keys;      // keys per block
  int parts, part_tokens;  // parts, indexed concurrently, of the tokens that have lists; tokens per part
  int cut;                 // how many consecutive parts form a span; a piece has tokens from one span only
  int most_tokens;         // tokens per piece, at most
  int64_t capacity;        // size of `tokens` per sequence and group: tokens that have lists * n
  int* part_counts;        // [B*Hkv, parts, blocks]: how many of the part's tokens list the block. index_plan_kernel
                           // replaces it by the index in `tokens` where these tokens begin
  int* tokens;             // [B*Hkv, capacity]: the tokens that list block 0, ascending, then block 1, ...
  KeyWork* work;           // [pieces, B*Hkv]: the pieces of work
  int2* block_slots;       // [B*Hkv, blocks]: the block's first partial sum slot, its piece count
  int pieces, slots;       // allocated per sequence and group: pieces of work; partial sum slots
  bool merges;             // whether short documents may share a piece
  DocumentView documents;
  // Whether token t sees a key of the block, an entry in its list. False for the padding -1, for blocks that begin
  // after t and for other documents' blocks, so that the bounds on pieces and slots hold for any list.
  __device__ __forceinline__ bool shows(int b, int block, int t) const {
    if (documents.begins != nullptr) {
      const DocumentRow<int> row = documents.row(b);
      return block >= row.first_blocks[t] && row.block_begins[block] <= t;
    }
    return block >= 0 && block <= block_keys.quotient(t);
  }
  // The tokens [x, y) that may see a key of the block: from its first token to its document's end. Empty for an id
  // without a block.
  __device__ __forceinline__ int2 viewers(int b, int block) const {
    const DocumentRow<int> row = documents.row(b);
    const int first = block < lists.blocks ? row.block_begin(block, block_keys.value()) : lists.tokens;
    return make_int2(first, first < lists.tokens ? row.end(first) : 0);
  }
  // Whether a block shares its piece of work. A row's tokens are divided into cells, block_keys tokens each; all
  // documents inside one cell share a piece. Each of them is a single block. Returns 0 if the block shares no piece;
  // for a shared piece's first block, the number of blocks after it; for the others, kShares.
  static constexpr int kShares = -1;
  __device__ __forceinline__ int merged_blocks(int b, int block) const {
    const DocumentRow<int> row = documents.row(b);
    if (!merges || !row.packed()) return 0;
    const int begin = row.block_begins[block];
    if (begin >= row.T) return 0;  // an id without a block
    const int window = block_keys.quotient(begin) * block_keys.value(),
              window_end = min(window + block_keys.value(), row.T);
    if (row.begin(begin) != begin || row.end(begin) > window_end) return 0;
    if (begin > window && row.begin(begin - 1) >= window) return kShares;
    const int last = window_end - 1;
    return row.first_block(row.end(last) <= window_end ? last : row.begin(last) - 1) - block;
  }
  // A part's first token; for part `parts`: where the last one ends, or later.
  __device__ __forceinline__ int part_begin(int part) const { return lists.first_token + part * part_tokens; }
  // One part's part_counts: [blocks].
  __device__ __forceinline__ int* counts(int bg, int part) const {
    return part_counts + (static_cast<int64_t>(bg) * parts + part) * lists.blocks;
  }
};

// Adds the lists of up to kCountTokens tokens in one part to part_counts. Grid: x the tokens, y the sequence and group.
// If in_shared, a CTA first counts in shared memory: every token lists block 0, and all tokens' atomics on one counter
// in global memory would serialize. That needs a counter per block, at most kCountedInShared.
constexpr int kCountTokens = 1024, kCountedInShared = 12 * 1024;
__global__ void __launch_bounds__(kScanThreads) index_count_kernel(const InverseIndex index, bool in_shared) {
  const BlockLists& lists = index.lists;
  const int part_ctas = ceil_div(index.part_tokens, kCountTokens), part = blockIdx.x / part_ctas;
  const int b = blockIdx.y / lists.groups, g = blockIdx.y % lists.groups;
  const int begin = index.part_begin(part) + blockIdx.x % part_ctas * kCountTokens;
  const int end = min(min(begin + kCountTokens, index.part_begin(part + 1)), lists.tokens);
  int* const by_block = reinterpret_cast<int*>(dynamic_shared());
  int* const counts = index.counts(blockIdx.y, part);
  if (in_shared) {
    for (int i = threadIdx.x; i < lists.blocks; i += kScanThreads) by_block[i] = 0;
    __syncthreads();
  }
  for (int i = threadIdx.x; i < (end - begin) * lists.n; i += kScanThreads) {
    const int row = index.n.quotient(i), block = lists.at(b, begin + row, g)[i - row * lists.n];
    if (index.shows(b, block, begin + row)) atomicAdd((in_shared ? by_block : counts) + block, 1);
  }
  if (!in_shared) return;
  __syncthreads();
  for (int i = threadIdx.x; i < lists.blocks; i += kScanThreads)
    if (by_block[i] != 0) atomicAdd(counts + i, by_block[i]);
}

// Tokens, pieces of work and partial sum slots, which index_plan_kernel sums over blocks.
struct WorkSum {
  int tokens, pieces, slots;
  __device__ __forceinline__ WorkSum operator+(const WorkSum& o) const {
    return {tokens + o.tokens, pieces + o.pieces, slots + o.slots};
  }
};
// Returns `mine` summed over the CTA's threads with a lower index; `total` is the sum over all threads.
__device__ __forceinline__ WorkSum sum_before(const WorkSum& mine, WorkSum& total) {
  return exclusive_scan<kScanThreads>(mine, total, [](const WorkSum& a, const WorkSum& b) { return a + b; });
}

// Plans one sequence and group per CTA, in two steps, with one thread per block. The first computes, for every block,
// where its tokens begin in the index, and its partial sum slots. The second writes the pieces of work, span by span.
__global__ void __launch_bounds__(kScanThreads) index_plan_kernel(const InverseIndex index) {
  const int bg = blockIdx.x, b = bg / index.lists.groups, blocks = index.lists.blocks, spans = index.parts / index.cut;
  int2* const block_slots = index.block_slots + static_cast<int64_t>(bg) * blocks;
  const auto pieces_of = [&](int tokens) { return ceil_div(tokens, index.most_tokens); };
  WorkSum done{};  // the sum over all blocks before block0
  for (int block0 = 0; block0 < blocks; block0 += kScanThreads) {
    const int block = block0 + threadIdx.x;
    const bool exists = block < blocks;
    int tokens = 0, pieces = 0;
    for (int span = 0; exists && span < spans; ++span) {
      int in_span = 0;
      for (int i = 0; i < index.cut; ++i) in_span += index.counts(bg, span * index.cut + i)[block];
      tokens += in_span, pieces += pieces_of(in_span);
    }
    WorkSum total;
    const WorkSum at = done + sum_before({tokens, 0, pieces > 1 ? pieces : 0}, total);
    done = done + total;
    if (!exists) continue;
    int first = at.tokens;
    for (int part = 0; part < index.parts; ++part) {
      int& count = index.counts(bg, part)[block];
      const int begin = first;
      first += count;
      count = begin;
    }
    const int merged = index.merged_blocks(b, block);  // if not 0: stored as x, with y = 0
    block_slots[block] = merged == 0 ? make_int2(bg * index.slots + at.slots, max(1, pieces)) : make_int2(merged, 0);
  }
  __syncthreads();
  const int all_tokens = done.tokens;

  // The last span is written first: its tokens see the most keys, so its pieces take the longest.
  int planned = 0;  // pieces written so far
  for (int span = spans - 1; span >= 0; --span)
    for (int block0 = 0; block0 < blocks; block0 += kScanThreads) {
      const int block = block0 + threadIdx.x;
      const bool exists = block < blocks;
      // The index in `tokens` where the block's tokens in span r begin; r = spans: where the block's tokens end.
      const auto begin_of = [&](int r) {
        if (r < spans) return index.counts(bg, r * index.cut)[block];
        return block + 1 < blocks ? index.counts(bg, 0)[block + 1] : all_tokens;
      };
      int begin = 0, tokens = 0, pieces = 0;
      const int2 slots = exists ? block_slots[block] : make_int2(0, 1);
      if (slots.y == 0) {  // merged: one piece for this block and the slots.x after it, or none
        const int after = block + slots.x + 1;
        pieces = span == 0 && slots.x != InverseIndex::kShares, begin = index.counts(bg, 0)[block];
        if (pieces > 0) tokens = (after < blocks ? index.counts(bg, 0)[after] : all_tokens) - begin;
      } else if (exists) {
        begin = begin_of(span), tokens = begin_of(span + 1) - begin, pieces = pieces_of(tokens);
        if (span == 0 && begin_of(spans) == begin) pieces = 1;  // no token lists the block: an empty piece writes zeros
      }
      WorkSum total;
      const int to = planned + sum_before({0, pieces, 0}, total).pieces;
      planned += total.pieces;
      if (pieces == 0) continue;
      int slot = slots.x;
      for (int r = 0; slots.y > 1 && r < span; ++r) slot += pieces_of(begin_of(r + 1) - begin_of(r));
      for (int i = 0; i < pieces; ++i)
        index.work[static_cast<int64_t>(to + i) * gridDim.x + bg] = {
            block, begin + i * index.most_tokens, min(index.most_tokens, tokens - i * index.most_tokens),
            slots.y > 1 ? slot + i : KeyWork::slot_of_merged(slots.y == 0 ? slots.x : 0)};
    }
  // Marks the unused entries in the piece list.
  for (int i = planned + threadIdx.x; i < index.pieces; i += kScanThreads)
    index.work[static_cast<int64_t>(i) * gridDim.x + bg] = {0, 0, -1, -1};
}

// Writes the index for one part of the tokens, for the kFillBlocks blocks from block0 on. Grid: x the part and the
// blocks, y the sequence and group. A CTA's warps divide the part's tokens among them; warp 0 has the first ones.
// First, each warp counts how many of its tokens list each block. Second, the CTA replaces each count by a place in the
// index: where the warp's first token that lists the block goes. This is the place for the part's first such token,
// which index_plan_kernel has computed, plus the counts from the warps before. Third, each warp reads its lists again
// and writes its tokens in ascending order. next[warp][block] is the count in the first step, and in the third one the
// place for the warp's next token that lists the block.
__global__ void __launch_bounds__(32 * kFillWarps) index_fill_kernel(const InverseIndex index) {
  __shared__ int next[kFillWarps][kFillBlocks];
  const BlockLists& lists = index.lists;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = blockIdx.x % index.parts, block0 = blockIdx.x / index.parts * kFillBlocks, bg = blockIdx.y;
  const int b = bg / lists.groups, g = bg % lists.groups, blocks = min(kFillBlocks, lists.blocks - block0);
  // All tokens in the part that see a key in the CTA's blocks are in [begin, end). The bounds cover all the CTA's ids.
  // The first id doesn't suffice, because in packed rows an id may have no block. For such an id, viewers() returns
  // (lists.tokens, 0), which changes neither bound.
  int low = lists.tokens, high = 0;
  for (int i = lane; i < blocks; i += 32) {
    const int2 seen_by = index.viewers(b, block0 + i);
    low = min(low, seen_by.x), high = max(high, seen_by.y);
  }
  const int begin = max(index.part_begin(part), static_cast<int>(__reduce_min_sync(kFullWarp, low)));
  const int end = min(index.part_begin(part + 1), static_cast<int>(__reduce_max_sync(kFullWarp, high)));
  if (begin >= end) return;
  const int most_of_warp = ceil_div(end - begin, kFillWarps);              // tokens
  const int first = min(begin + warp * most_of_warp, end);                 // the warp's first token
  const int entries = (min(first + most_of_warp, end) - first) * lists.n;  // entries in the warp's lists
  // The lists of the warp's tokens, one after the other, form one sequence of entries. for_entries(visit) takes 32
  // consecutive entries at a time, one in each lane, and every lane calls visit(row, block) for its entry:
  //   row    the entry's token minus `first`
  //   block  the entry's block minus block0. It is -1 if the block isn't the CTA's, or if the token sees no key in the
  //          block.
  // Lanes after the last entry call visit() with the last entry's row and with block -1. To hide latency, a lane loads
  // kAhead entries before it calls visit() for the first one.
  constexpr int kAhead = 8;
  const auto for_entries = [&](auto visit) {
    for (int i0 = 0; i0 < entries; i0 += 32 * kAhead) {
      int row[kAhead], block[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = min(i0 + 32 * j + lane, entries - 1);
        row[j] = index.n.quotient(i);
        block[j] = lists.at(b, first + row[j], g)[i - row[j] * lists.n];
        if (i0 + 32 * j + lane >= entries) block[j] = -1;
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const bool listed =
            block[j] >= block0 && block[j] < block0 + blocks && index.shows(b, block[j], first + row[j]);
        visit(row[j], listed ? block[j] - block0 : -1);
      }
    }
  };

  for (int i = lane; i < blocks; i += 32) next[warp][i] = 0;
  __syncwarp();
  for_entries([&](int, int block) {
    if (block >= 0) atomicAdd(&next[warp][block], 1);
  });
  __syncthreads();
  for (int i = threadIdx.x; i < blocks; i += 32 * kFillWarps) {
    int to = index.counts(bg, part)[block0 + i];
#pragma unroll
    for (int w = 0; w < kFillWarps; ++w) {
      const int tokens = next[w][i];
      next[w][i] = to;
      to += tokens;
    }
  }
  __syncthreads();

  // A visit()'s 32 entries belong to consecutive tokens. The loop takes these tokens one after the other, in ascending
  // order: the lanes with the token's entries write the token to their blocks' index. So each block's tokens ascend in
  // the index.
  int* const out = index.tokens + bg * index.capacity;
  for_entries([&](int row, int block) {
    const int last = __shfl_sync(kFullWarp, row, 31);
    for (int turn = __shfl_sync(kFullWarp, row, 0); turn <= last; ++turn) {
      if (row == turn && block >= 0) out[atomicAdd(&next[warp][block], 1)] = first + turn;
      __syncwarp();
    }
  });
}

}  // namespace

SelectedKeys make_selected_keys(const char* op, const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  const int64_t first = in.documents.part.first_query, T = first + in.q.size(1), n = block_index.size(3);
  TRIAD_CHECK(T * n < (int64_t{1} << 31), "{}: T = {} times n = {} does not fit 31 bits", op, T, n);
  const auto tokens = static_cast<int>(T), block = static_cast<int>(std::min(l_sel, T));  // no block is longer than T
  return {.range = {.window = tokens, .l = 1, .d = 1, .keys = tokens, .documents = document_view(in.documents, T)},
          .lists = {block_index.ptr<int32_t>() - first * block_index.stride[1], block_index.stride[0],
                    block_index.stride[1], block_index.stride[2], tokens, static_cast<int>(in.k.size(2)),
                    static_cast<int>(in.documents.empty() ? ceil_div(tokens, block) : in.documents.ids()),
                    static_cast<int>(n), static_cast<int>(first)},
          .block_keys = block};
}

KeyWorkList build_inverse_index(Context& ctx, Scratch::Scope& scope, const char* op, const AttendIn& in,
                                const SelectedKeys& keys, const PiecePlan& plan, bool has_partial) {
  const BlockLists& lists = keys.lists;
  const int64_t T = lists.tokens, bgs = in.k.size(0) * in.k.size(2), blocks = lists.blocks;
  const int64_t queries = T - lists.first_token, capacity = queries * lists.n;
  const int64_t part_tokens = ceil_div(queries, plan.parts);
  const auto [pieces, slots] = key_work_bounds({T, lists.n, keys.block_keys, blocks, queries}, plan);
  TRIAD_CHECK(bgs * pieces < (int64_t{1} << 31), "{}: {} pieces of work do not fit 31 bits", op, bgs * pieces);
  const Tensor counts = scope.alloc(DType::i32, {bgs, plan.parts, blocks});
  const Tensor tokens = scope.alloc(DType::i32, {bgs, capacity});
  const Tensor work = scope.alloc(DType::i32, {pieces, bgs, sizeof(KeyWork) / sizeof(int)});
  const Tensor block_slots = scope.alloc(DType::i32, {bgs, blocks, 2});
  const InverseIndex index{.lists = lists,
                           .n = Divisor(lists.n),
                           .block_keys = Divisor(keys.block_keys),
                           .parts = static_cast<int>(plan.parts),
                           .part_tokens = static_cast<int>(part_tokens),
                           .cut = static_cast<int>(plan.cut),
                           .most_tokens = static_cast<int>(plan.most_tokens),
                           .capacity = capacity,
                           .part_counts = counts.ptr<int32_t>(),
                           .tokens = tokens.ptr<int32_t>(),
                           .work = reinterpret_cast<KeyWork*>(work.data),
                           .block_slots = reinterpret_cast<int2*>(block_slots.data),
                           .pieces = static_cast<int>(pieces),
                           .slots = static_cast<int>(slots),
                           .merges = plan.merges,
                           .documents = keys.range.documents};
  zero(ctx, counts);
  const auto grid_y = static_cast<unsigned>(bgs);
  const auto count_ctas = static_cast<unsigned>(plan.parts * ceil_div(part_tokens, kCountTokens));
  const bool in_shared = blocks <= kCountedInShared;
  launch(ctx, "count_entries", index_count_kernel, dim3(count_ctas, grid_y), dim3(kScanThreads),
         in_shared ? blocks * static_cast<int64_t>(sizeof(int)) : 0, index, in_shared);
  launch(ctx, "plan_work", index_plan_kernel, dim3(grid_y), dim3(kScanThreads), 0, index);
  const auto fill_ctas = static_cast<unsigned>(ceil_div(blocks, kFillBlocks) * plan.parts);
  launch(ctx, "fill_index", index_fill_kernel, dim3(fill_ctas, grid_y), dim3(32 * kFillWarps), 0, index);

  KeyWorkList list{.block_keys = keys.block_keys,
                   .blocks = lists.blocks,
                   .pieces = static_cast<int>(pieces),
                   .work = index.work,
                   .tokens = index.tokens,
                   .tokens_stride = capacity,
                   .block_slots = index.block_slots,
                   .partial = nullptr};
  if (has_partial && slots > 0) {
    const int64_t width = in.k.size(3) + in.v.size(3);
    list.partial = scope.alloc(DType::f32, {bgs * slots, keys.block_keys, width}).ptr<float>();
  }
  return list;
}

}  // namespace triad::cuda
