// NSA's selection on Hopper for bf16: block scores by wgmma, then the top n, in one kernel.
//
// A CTA with four warps computes 8, 16 or 32 tokens in one (sequence, group), all within one selection block, so that
// they have the same candidates. Each warp processes a stripe of the compressed keys, 32 keys per step:
//   1. Keys are the product's rows, in registers, loaded through a buffer in shared memory one step ahead. Queries are
//      its columns, in shared memory: a tile's tokens x heads. A lane's column is the same token for every head, so the
//      sum over heads is an addition in a register. Each step is split into two products; one runs during the other's
//      exponentials.
//   2. A lane has four neighbouring keys for a token: Eq. 9's pooling is register additions, and one shuffle for the
//      key that overlaps the previous block. Across stripes it goes through shared memory.
//   3. A warp writes its tokens' lists together. Candidates form 32 groups (64 for long lists); the n-th best group
//      maximum is a lower bound on the n-th best score. If at most 32 candidates reach it, the lowest are removed as
//      long as n are left; up to 64 are sorted; if more reach it (nearly equal scores, n above 32), all scores are
//      searched by bisection.
// All sums are fp32, in an order that doesn't depend on the block: equal scores stay equal, and the lower block wins.
//
// CTAs are persistent and compute the longest tiles first. An SM's CTAs progress unevenly, so items are assigned
// dynamically; the next tile's queries are loaded while lists are written. Scores (T / l' * 4 bytes per token) are in
// shared memory if a full SM has room for them, else in a scratch slab that stays in L2.
// Bound: T^2 / (2d) * Hq exponentials, and tensor cores, which slow each other down;
// tests/baselines/findings/select.md.
#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/nsa/gpu/share_lists.h"
#include "kernels/nsa/sm90/launch_select.h"
#include "kernels/nsa/sm90/select_scores.cuh"

namespace triad::cuda {
namespace {

constexpr int kLongRow = 256;  // rows with at least this many blocks are read four blocks at a time
constexpr int kMaxSlots = 64;
constexpr int64_t kTakes = 4;  // items are assigned dynamically if there are at least this many per CTA

__device__ __forceinline__ unsigned next_item(const SelectArgs& a, unsigned item) {
  return gridDim.x + (a.taken == nullptr ? item : atomicAdd(a.taken, 1));
}

// Writes the block lists for the tile's kWarpTokens tokens from number token0 on, from their score rows. work is this
// warp's part of shared memory: kFound * 8 bytes per token, or kFound * 12 for long rows.
template <int kWarpTokens, int kBatch>
__device__ __forceinline__ void write_lists(const SelectArgs& a, const Tile& tile, const Candidates& c, float* scores,
                                            const float (&ends)[kWarps][kMaxTokens], int steps, int token0,
                                            unsigned char* work) {
  const int lane = threadIdx.x % 32;
  float* rows = scores + token0 * a.row_floats;
  if (lane < kWarpTokens * kWarps) {  // adds the contributions from keys that overlap the border between two stripes
    const int t = lane / kWarps, stripe = lane % kWarps, block = stripe * steps * kWarpKeys >> a.key_shift;
    if (stripe > 0 && block >= c.begin && block < c.end) rows[t * a.row_floats + block] += ends[stripe - 1][token0 + t];
  }
  __syncwarp();
  int2* const found = reinterpret_cast<int2*>(work);
  Collector<kWarpTokens, kBatch> collector{rows, a.row_floats, c.end, found, {}, {}};
  if (c.end < kLongRow) {
    collector.bound_short(c.slots);
    collector.collect_short();
  } else {
    collector.bound_long(c.slots);
    collector.collect_long(reinterpret_cast<int*>(found + kWarpTokens * kFound));
  }
  __syncwarp();
  int value[2][kWarpTokens], block[2][kWarpTokens];
  const auto& count = collector.count;
  bool two = false;
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t) {
    two = two || count[t] > 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int2 x = found[t * kFound + 32 * i + lane];
      value[i][t] = 32 * i + lane < count[t] ? x.x : -1, block[i][t] = x.y;
    }
  }
  int nth[kWarpTokens];
  if (two)
    find_nth(nth, c.slots, value, true);
  else
    find_nth_of_few(nth, c.slots, value[0], count);
  int32_t* list = a.block_index.row(tile.b, tile.first + token0, tile.g);
#pragma unroll
  for (int t = 0; t < kWarpTokens; ++t, list += a.block_index.stride_t) {
    if (token0 + t >= tile.count) break;
#pragma unroll 1
    for (int j = lane; j < c.begin; j += 32) list[j] = tile.block0 + j;
#pragma unroll 1
    for (int j = lane; j < a.local_blocks; j += 32) list[c.begin + c.slots + j] = tile.block0 + c.end + j;
    if (count[t] <= kFound) {
      const int above = __popc(__ballot_sync(kFullWarp, value[0][t] > nth[t])) +
                        (two ? __popc(__ballot_sync(kFullWarp, value[1][t] > nth[t])) : 0);
      const Cut cut{nth[t], c.slots - above};
      int listed = 0, equals = 0;
      write_taken(list + c.begin, c.slots, cut, value[0][t], tile.block0 + block[0][t], listed, equals);
      if (two) write_taken(list + c.begin, c.slots, cut, value[1][t], tile.block0 + block[1][t], listed, equals);
    } else {
      write_searched(list + c.begin, rows + t * a.row_floats, c.begin, c.end, c.slots, collector.bound[t], tile.block0);
    }
  }
}

// Writes the lists for one span of kListedTokens tokens, except tokens that need scores: a token with at most n blocks
// lists all blocks up to its own. item: the span's index, over all sequences and groups.
__device__ __forceinline__ void list_all(const SelectArgs& a, unsigned item) {
  const int b = static_cast<int>(item % a.bgs / a.groups), g = static_cast<int>(item % a.groups);
  const int first = a.first_token + static_cast<int>(item / a.bgs) * kListedTokens,
            end = min(first + kListedTokens, a.scored_from);
  const int width = a.n_sel <= 16 ? 16 : 32;  // lanes per token
  const DocumentRow<int> row = a.documents.row(b);
  int t = first + static_cast<int>(threadIdx.x) / width;
  int32_t* list = a.block_index.row(b, t, g);
  for (; t < end; t += kWarpgroup / width, list += kWarpgroup / width * a.block_index.stride_t) {
    const int own = t - row.begin(t) >> a.token_shift, block0 = row.first_block(t);
    if (own >= a.n_sel) continue;  // the token needs scores
    for (int i = threadIdx.x % width; i < a.n_sel; i += width) list[i] = i <= own ? block0 + i : -1;
  }
}

// Writes packed rows' tiles that need scores to `list` (SelectArgs::packed_tiles), in any order, and adds their number
// to *count. Each thread tests one tile. Every block id has l' / tile_tokens tiles; a tile past the block's end, or
// before first_token, where the call has no queries, has no tokens and is not listed.
constexpr int kListThreads = 256;
__global__ void __launch_bounds__(kListThreads)
    list_tiles_kernel(const DocumentView documents, int first_token, int tile_tokens, int token_shift, int n_sel,
                      int batch, int4* list, int* count) {
  const int per_block = (1 << token_shift) / tile_tokens, per_row = documents.ids * per_block;
  const int64_t at = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  int4 tile = {};
  if (at < int64_t{batch} * per_row) {
    // The first threads have each row's last tiles. These see the most keys, and the longest tiles should be among the
    // list's first.
    const int b = static_cast<int>(at % batch), row_tile = per_row - 1 - static_cast<int>(at / batch);
    const DocumentRow<int> row = documents.row(b);
    const int begin = row.block_begins[row_tile / per_block], tile_begin = begin + row_tile % per_block * tile_tokens;
    const int first = max(tile_begin, first_token);
    if (begin < row.T) {
      const int document = row.begin(begin),
                end = min(tile_begin + tile_tokens, row.block_end(row_tile / per_block, 1 << token_shift));
      if (first < end && first - document >> token_shift >= n_sel)
        tile = make_int4(first, document, row.first_block(begin), 32 * b + end - first);
    }
  }
  const unsigned listed = __ballot_sync(kFullWarp, tile.w != 0);
  const int lane = threadIdx.x % 32;
  int to = lane == 0 && listed != 0 ? atomicAdd(count, __popc(listed)) : 0;
  to = __shfl_sync(kFullWarp, to, 0) + __popc(listed & ((1u << lane) - 1));
  if (tile.w != 0) list[to] = tile;
}

// How many tokens' lists a warp writes together.
constexpr int listed_at_once(int64_t tile_tokens) {
  return static_cast<int>(tile_tokens / kWarps < 4 ? tile_tokens / kWarps : 4);
}

// CTAs per SM, as given to __launch_bounds__.
template <int kPanels>
constexpr int kResident = kPanels == 1   ? 4
                          : kPanels == 2 ? 3
                                         : 2;

// The selection kernel. Its items are tiles that need scores, the longest first, and then spans of tokens that need
// none. The next tile's queries and first keys are loaded while a tile's lists are written.
template <int kPanels, int kTokens, int kColumns, bool kInShared, bool kPacked>
__global__ void __launch_bounds__(kWarpgroup, kResident<kPanels>)
    select_sm90_kernel(const __grid_constant__ SelectArgs a) {
  constexpr int kWarpTokens = kTokens / kWarps, kListTokens = listed_at_once(kTokens);
  constexpr std::bool_constant<kPacked> packed;
  const int warp = threadIdx.x / 32;
  unsigned char* const queries = aligned_shared();
  unsigned char* const key_buffers = queries + a.query_bytes;
  float* const lse = reinterpret_cast<float*>(key_buffers + kWarps * WarpKeys<kPanels>::kBytes);
  SharedEnds& ends = *reinterpret_cast<SharedEnds*>(lse + a.columns);
  unsigned char* const lists = reinterpret_cast<unsigned char*>(&ends + 1) + warp * a.list_bytes;
  float* scores;
  if constexpr (kInShared)
    scores = reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(&ends + 1) + kWarps * a.list_bytes);
  else
    scores = a.slab + static_cast<int64_t>(blockIdx.x) * kTokens * a.row_floats;
  // For packed rows, the count of items that need scores is kept in shared memory, because the loop over keys needs all
  // registers.
  if constexpr (kPacked) {
    if (threadIdx.x == 0) ends.scored_items = static_cast<unsigned>(*a.packed_count) * a.groups;
    __syncthreads();
  }
  const auto scored_items = [&] {
    if constexpr (kPacked)
      return ends.scored_items;
    else
      return static_cast<unsigned>(a.scored_tiles) * a.bgs;
  };
  const auto steps_of = [&](const Candidates& c) {
    return ((c.end << a.key_shift) + kWarps * kWarpKeys - 1) / (kWarps * kWarpKeys);
  };
  const auto begin = [&](unsigned item) {
    if (item >= scored_items()) return;
    const Tile tile(a, item, kTokens, packed);
    WarpKeys<kPanels>::copy(shared_address(key_buffers) + warp * WarpKeys<kPanels>::kBytes,
                            WarpKeys<kPanels>::lane_part(a.k.row(tile.b, tile.key0, tile.g)), a.key_bytes,
                            warp * steps_of(Candidates(a, tile)) * kWarpKeys, a.keys - tile.key0);
    copy_queries<kPanels, kTokens, kColumns>(a, tile, queries, lse);
  };
  unsigned item = blockIdx.x;
  begin(item);
  while (item < scored_items()) {
    const Tile tile(a, item, kTokens, packed);
    finish_queries<kTokens>(a, tile, lse);
    __syncthreads();
    if (threadIdx.x == 0) ends.next_item = next_item(a, item);
    const Candidates c(a, tile);
    score_tile<kPanels, kTokens, kColumns>(a, tile, c, queries, lse, key_buffers, scores, ends.last, steps_of(c));
    __syncthreads();
    asm volatile(""
                 : "+r"(item));  // makes the compiler recompute the tile: keeping it would take registers from the
                                 // loop over keys
    const Tile done(a, item, kTokens, packed);
    item = ends.next_item;
    begin(item);
    const Candidates candidates(a, done);
#pragma unroll 1
    for (int t = warp * kWarpTokens; t < (warp + 1) * kWarpTokens; t += kListTokens) {
      write_lists<kListTokens, kInShared ? 2 : 16 / kListTokens>(a, done, candidates, scores, ends.last,
                                                                 steps_of(candidates), t, lists);
      __syncwarp();
    }
  }
  const unsigned scored = scored_items();
  while (item < scored + static_cast<unsigned>(ceil_div(a.scored_from - a.first_token, kListedTokens)) * a.bgs) {
    list_all(a, item - scored);
    __syncthreads();
    if (threadIdx.x == 0) ends.next_item = next_item(a, item);
    __syncthreads();
    item = ends.next_item;
  }
}

// What a launch needs to know: shared memory sizes, whether the scores fit there (in_shared), and whether items are
// assigned to CTAs dynamically (takes).
struct Plan {
  int64_t columns, turns;
  int64_t query_bytes, list_bytes, work_bytes, row_floats;
  int64_t tokens, ctas;  // tokens per tile; the most CTAs
  bool in_shared, takes;
  int64_t score_bytes() const { return 4 * tokens * row_floats; }
};

// Tokens per tile for rows that are not packed. The more tokens, the less often are the keys read from L2. Groups with
// 1 or 2 heads of width 64, or 1 to 8 heads of width 128, have wide tiles.
int64_t tile_tokens(int64_t panels, int64_t heads, const SelectOptions& o, int64_t first_query) {
  const int64_t usual = panels == 1 ? kTokensOf<1> : kTokensOf<2>;
  if (o.l_sel % kMaxTokens != 0 || first_query % kMaxTokens != 0) return usual;
  if (panels == 1 && heads <= 2) return kMaxTokens;
  if (panels == 2 && heads <= 8) return heads <= 4 ? kMaxTokens : 16;
  return usual;
}

// queries: tokens up to number `tokens` that have queries.
Plan make_plan(const Context& ctx, int64_t queries, int64_t tokens, int64_t dk, int64_t heads, int64_t bgs,
               const SelectOptions& o, bool packed) {
  constexpr int64_t kSharedOfSm = 228 * 1024, kReserved = 1024;
  constexpr int kOfPanels[] = {0, kResident<1>, kResident<2>, kResident<3>};
  const int64_t panels = dk / kPanel, size = o.l_sel / o.d, resident = kOfPanels[panels];
  Plan p{};
  const int64_t usual = panels == 1 ? kTokensOf<1> : kTokensOf<2>;
  p.tokens = packed ? usual : tile_tokens(panels, heads, o, tokens - queries);
  // Chooses the columns per turn that need the least padding; if equal, the one with the fewest turns.
  for (const int64_t columns : {32, 64, 96, 128}) {
    if (panels == 2 && p.tokens == 16 && columns != 128) continue;  // run() exists for 128 columns alone here
    const int64_t all = align_up(heads * p.tokens, columns);
    if (p.columns == 0 || all <= p.columns) p.columns = all, p.turns = all / columns;
  }
  const int64_t rows = p.columns;
  p.query_bytes = panels * rows * kPanelRowBytes;
  const int64_t blocks =
      std::max<int64_t>(1, (tokens - 1) / o.l_sel - o.local_blocks + 1);  // the most candidates per token
  const int64_t stored = align_up(blocks * size, kWarps * kWarpKeys) / size;
  p.row_floats = align_up(stored - 4, 16) + 4;  // stride 4 modulo 16 avoids bank conflicts
  p.list_bytes = listed_at_once(p.tokens) * kFound * (blocks < kLongRow ? 8 : 12);
  p.work_bytes = p.query_bytes + kWarps * panels * WarpKeys<1>::kBytes + 4 * rows +
                 static_cast<int64_t>(sizeof(SharedEnds)) + kWarps * p.list_bytes;
  p.in_shared = resident * (p.work_bytes + p.score_bytes() + kReserved) <= kSharedOfSm;
  p.ctas = resident * ctx.num_sms;
  p.takes = ceil_div(queries, p.tokens) * bgs > kTakes * p.ctas;
  return p;
}

template <int kPanels, int kTokens, int kColumns>
void run(Context& ctx, const SelectArgs& a, const Plan& p, int64_t ctas) {
  const auto queue = [&](auto kernel) {
    launch(ctx, "nsa_select", kernel, dim3(ctas), kWarpgroup, p.work_bytes + (p.in_shared ? p.score_bytes() : 0), a);
  };
  constexpr bool usual = kTokens == kTokensOf<kPanels>;
  if constexpr (usual)
    if (a.packed_tiles != nullptr)
      return p.in_shared ? queue(select_sm90_kernel<kPanels, kTokens, kColumns, true, true>)
                         : queue(select_sm90_kernel<kPanels, kTokens, kColumns, false, true>);
  p.in_shared ? queue(select_sm90_kernel<kPanels, kTokens, kColumns, true, false>)
              : queue(select_sm90_kernel<kPanels, kTokens, kColumns, false, false>);
}

template <int kPanels, int kTokens>
void run(Context& ctx, const SelectArgs& a, const Plan& p, int64_t ctas) {
  switch (p.columns / p.turns) {
    case 32:
      return run<kPanels, kTokens, 32>(ctx, a, p, ctas);
    case 64:
      return run<kPanels, kTokens, 64>(ctx, a, p, ctas);
    case 96:
      return run<kPanels, kTokens, 96>(ctx, a, p, ctas);
    default:
      return run<kPanels, kTokens, 128>(ctx, a, p, ctas);
  }
}

template <int kPanels>
void run(Context& ctx, const SelectArgs& a, const Plan& p, int64_t ctas) {
  if (p.tokens != kTokensOf<kPanels>) {
    if constexpr (kPanels == 1)
      return p.columns / p.turns == 32 ? run<1, kMaxTokens, 32>(ctx, a, p, ctas)
                                       : run<1, kMaxTokens, 64>(ctx, a, p, ctas);
    if constexpr (kPanels == 2)
      return p.tokens == 16 ? run<2, 16, 128>(ctx, a, p, ctas) : run<2, kMaxTokens>(ctx, a, p, ctas);
  }
  run<kPanels, kTokensOf<kPanels>>(ctx, a, p, ctas);
}

void run_plan(Context& ctx, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
              const SelectOptions& o, const Documents& documents, const Plan& p) {
  const int64_t first = documents.part.first_query, tokens = first + q.size(1);
  const int64_t B = q.size(0), Hkv = k_cmp.size(2), dk = q.size(3), G = q.size(2) / Hkv;
  const bool packed = !documents.empty();
  const int64_t scored_from = packed ? tokens : std::max(first, std::min(tokens, o.n_sel * o.l_sel));
  const int64_t scored_tiles =
      packed ? documents.ids() * (o.l_sel / p.tokens) : ceil_div(tokens - scored_from, p.tokens);
  const int64_t ctas = std::min((scored_tiles + ceil_div(scored_from - first, kListedTokens)) * B * Hkv, p.ctas);
  Scratch::Scope scope(ctx.scratch);
  float* const slab = p.in_shared ? nullptr : scope.alloc(DType::f32, {ctas, p.tokens * p.row_floats}).ptr<float>();
  Tensor tiles, count;
  if (packed) {
    tiles = scope.alloc(DType::i32, {B * scored_tiles, 4}), count = scope.alloc(DType::i32, {1});
    zero(ctx, count);
    launch(ctx, "list_tiles", list_tiles_kernel, dim3(static_cast<unsigned>(ceil_div(B * scored_tiles, kListThreads))),
           dim3(kListThreads), 0, document_view(documents, tokens), static_cast<int>(first), static_cast<int>(p.tokens),
           std::countr_zero(static_cast<uint64_t>(o.l_sel)), static_cast<int>(o.n_sel), static_cast<int>(B),
           reinterpret_cast<int4*>(tiles.data), count.ptr<int>());
  }
  const Tensor taken = p.takes ? scope.alloc(DType::i32, {1}) : Tensor{};
  if (p.takes) zero(ctx, taken);
  // Row t in these views belongs to token t; rows before the first query's don't exist.
  const auto from_first = [&](auto view) {
    view.data -= first * view.stride_t;
    return view;
  };
  const SelectArgs a{.block_index = from_first(bthd<int32_t>(block_index)),
                     .q = from_first(bthd<__nv_bfloat16>(q)),
                     .k = bthd<__nv_bfloat16>(k_cmp),
                     .lse = from_first(bthd<float>(lse_cmp.view({B, q.size(1), q.size(2), 1}))),
                     .first_token = static_cast<int>(first),
                     .tokens = static_cast<int>(tokens),
                     .keys = static_cast<int>(k_cmp.size(1)),
                     .heads = static_cast<int>(G),
                     .key_bytes = static_cast<int>(k_cmp.stride[1] * 2),
                     .groups = static_cast<unsigned>(Hkv),
                     .bgs = static_cast<unsigned>(B * Hkv),
                     .columns = static_cast<int>(p.columns),
                     .turns = static_cast<int>(p.turns),
                     .l = static_cast<int>(o.l),
                     .d = static_cast<int>(o.d),
                     .n_sel = static_cast<int>(o.n_sel),
                     .init_blocks = static_cast<int>(o.init_blocks),
                     .local_blocks = static_cast<int>(o.local_blocks),
                     .token_shift = std::countr_zero(static_cast<uint64_t>(o.l_sel)),
                     .key_shift = std::countr_zero(static_cast<uint64_t>(o.l_sel / o.d)),
                     .whole = o.l == o.d ? 1.0f : 2.0f,
                     .over = o.l == o.d ? 0.0f : 1.0f,
                     .scale = kLog2e / std::sqrt(static_cast<float>(dk)),
                     .scored_from = static_cast<int>(scored_from),
                     .scored_tiles = static_cast<int>(scored_tiles),
                     .packed_tiles = packed ? reinterpret_cast<const int4*>(tiles.data) : nullptr,
                     .packed_count = packed ? count.ptr<int>() : nullptr,
                     .query_bytes = static_cast<int>(p.query_bytes),
                     .list_bytes = static_cast<int>(p.list_bytes),
                     .row_floats = static_cast<int>(p.row_floats),
                     .slab = slab,
                     .taken = p.takes ? taken.ptr<int>() : nullptr,
                     .documents = document_view(documents, tokens)};
  if (dk == 64)
    run<1>(ctx, a, p, ctas);
  else if (dk == 128)
    run<2>(ctx, a, p, ctas);
  else
    run<3>(ctx, a, p, ctas);
}

}  // namespace

bool select_sm90_supports(const ConstTensor& q, const ConstTensor& k_cmp, const SelectOptions& o,
                          const Documents& documents) {
  const int64_t dk = q.size(3), heads = q.size(2) / k_cmp.size(2), span = o.l / o.d, size = o.l_sel / o.d;
  const int64_t tokens = documents.empty() ? q.size(1) : documents.ids() * o.l_sel;  // tokens per sequence, as tiles
                                                                                     // cut it
  return !selects_strided_rows(o, documents) && q.dtype == DType::bf16 && all_have_vectors(8, q, k_cmp) &&
         (dk == 64 || dk == 128 || dk == 192) && heads <= 32 && o.l == span * o.d && (span == 1 || span == 2) &&
         o.l_sel == size * o.d && (size == 2 || size == 4 || size == 8) && o.l_sel % kTokensOf<1> == 0 &&
         std::has_single_bit(static_cast<uint64_t>(o.l_sel)) && o.n_sel > o.init_blocks + o.local_blocks &&
         o.n_sel - o.init_blocks - o.local_blocks <= kMaxSlots && o.n_sel < (int64_t{1} << 16) && q.size(1) > 0 &&
         documents.part.tokens_or(q.size(1)) < (int64_t{1} << 27) && documents.part.first_query % kTokensOf<1> == 0 &&
         k_cmp.stride[1] < (int64_t{1} << 30) && o.l_sel < (int64_t{1} << 16) &&
         ceil_div(tokens, kTokensOf<2>) * q.size(0) * k_cmp.size(2) < (int64_t{1} << 30);
}

void select_sm90(Context& ctx, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                 const SelectOptions& o, const Documents& documents) {
  const int64_t groups = k_cmp.size(2), heads = q.size(2) / groups;
  run_plan(ctx, block_index, q, k_cmp, lse_cmp, o, documents,
           make_plan(ctx, q.size(1), documents.part.first_query + q.size(1), q.size(3), heads, q.size(0) * groups, o,
                     !documents.empty()));
}

}  // namespace triad::cuda
