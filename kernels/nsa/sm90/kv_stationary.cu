// The selected branch's KV-stationary forward on Hopper (bf16), split-KV and merge, for long sequences whose
// neighbouring tokens list different blocks. There a tile with the union of its tokens' lists would compute mostly
// masked scores: 7 times too many for ten tokens with random lists at T = 65536.
//
// A far block's keys and values stay in shared memory, and the rows (t, h) for the tokens that list it are gathered, 64
// per tile, for any G without waste: s = q k^T, softmax over this block, o = p v. The result for a row is a partial
// sum. Partial sums are stored block by block; the merge kernel looks up a token's. Near blocks, which all neighbours
// list, are computed for neighbouring tokens at once and stored to o and lse; the merge kernel adds the partial sums to
// them in list order.
//
// Partial sums for all tokens would take n * dv * 2 bytes per row: 1.6 GB at 65536 x 12 x 64. The sequence is therefore
// cut into token ranges, and a launch computes as many ranges as fit kPartialBytes. Kernels:
//   kv_stationary_read_lists: decides whether neighbours' lists differ enough, in packed rows for each document; if
//       not, another kernel computes the tokens, and the kernels below leave them out. Counts each block's entries (t,
//       place).
//   kv_stationary_plan_items, kv_stationary_fill_entries: each range's entries by block, cut into items.
//   fwd_kv_stationary_near: a CTA computes one or two blocks' tokens with all their near blocks.
//   fwd_kv_stationary_gather: a CTA computes one item: a far block and up to 16 tiles for its entries.
//   fwd_kv_stationary_merge: dv / 8 lanes per row, all partial sums in flight. Combines the branches if requested.
// Bound: merge by device memory; gather by no single unit. tests/baselines/findings/selected.md has the figures.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/fork_join.h"
#include "kernels/nsa/gpu/combine.cuh"
#include "kernels/nsa/sm90/kv_stationary_gather.cuh"
#include "kernels/nsa/sm90/launch_forward.h"

namespace triad::cuda {
namespace {

// ---- merging ----

// Adds a row's partial sums to its near blocks' result. A lane has 16 bytes of the row, in the gather kernel's column
// order, and kPlaces partial sums in flight. A row's lanes share the work of looking up entries and sums.
constexpr int kMergeThreads = 128, kPlaces = 8;
template <int kDv>
__global__ void __launch_bounds__(kMergeThreads, 8)
    fwd_kv_stationary_merge_kernel(const __grid_constant__ KvStationaryArgs a,
                                   const __grid_constant__ CombineRows combine, int first_step) {
  constexpr int kLanes = kDv / 8;
  static_assert(kPlaces <= kLanes);
  if (a.nothing_to_do() && !combine.active()) return;
  const int lane = threadIdx.x % kLanes, G = a.heads.value();
  const int n = a.n.value(), step_rows = a.range_tokens * G;
  const int at = blockIdx.x * (kMergeThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
  const int step = min(first_step + at / step_rows, a.steps - 1), row = at % step_rows;
  const int t_in_range = min(a.heads.quotient(row), a.tokens_of(step) - 1), t = a.first_token(step) + t_in_range;
  const bool exists = first_step + at / step_rows == step && a.heads.quotient(row) == t_in_range;
  const int bg = step / a.ranges, b = bg / a.lists.groups, g = bg % a.lists.groups;
  const int in_group = row - a.heads.quotient(row) * G, h = g * G + in_group;
  const bool merges = a.share.has(b, t);  // if false, another kernel has computed the row
  const bool any_merges = __any_sync(kFullWarp, merges);
  const int64_t first = a.first_row(step) + in_group;
  const int* const entry_of = a.entry_of + static_cast<int64_t>(step) * a.entries_stride + t_in_range * n;

  float* const lse = a.lse.at(b, t, h);
  bf16* const o = a.o.at(b, t, h) + 8 * lane;
  const uint4 near = *reinterpret_cast<const uint4*>(o);
  float row_max = *lse * kLog2e, sum = row_max == -INFINITY ? 0.0f : 1.0f, out[8];
  for (int place0 = 0; any_merges && place0 < n; place0 += kPlaces) {
    const int place = place0 + lane;
    const int entry = merges && lane < kPlaces && place < n ? __ldg(entry_of + place) : -1;
    // one partial sum's row_max (in powers of 2) and probability sum
    const float2 sums =
        entry >= 0 ? __ldcs(a.partial_sums + first + static_cast<int64_t>(entry) * G) : make_float2(-INFINITY, 0.0f);
    uint4 partial[kPlaces];
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      const int64_t at = __shfl_sync(kFullWarp, entry, j, kLanes);
      partial[j] = at >= 0 ? __ldcs(reinterpret_cast<const uint4*>(a.partial + (first + at * G) * kDv + 8 * lane))
                           : make_uint4(0, 0, 0, 0);
    }
    float best = fmaxf(row_max, sums.x);
#pragma unroll
    for (int by = 1; by < kLanes; by *= 2) best = fmaxf(best, __shfl_xor_sync(kFullWarp, best, by));
    const float base = best == -INFINITY ? 0.0f : best, rescale = exp2_approx(row_max - base);
    const float own_weight = exp2_approx(sums.x - base);
    float added = own_weight * sums.y;
#pragma unroll
    for (int by = 1; by < kLanes; by *= 2) added += __shfl_xor_sync(kFullWarp, added, by);
    row_max = best, sum = fmaf(sum, rescale, added);
    if (place0 == 0) {
      const uint32_t words[4] = {near.x, near.y, near.z, near.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        out[2 * i] = __uint_as_float(words[i] << 16), out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) out[c] *= rescale;
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      const float weight = __shfl_sync(kFullWarp, own_weight, j, kLanes);
      const uint32_t words[4] = {partial[j].x, partial[j].y, partial[j].z, partial[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), out[2 * i]);
        out[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000u), out[2 * i + 1]);
      }
    }
  }
  uint4 columns = near;
  if (any_merges) {
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_bf16(out[2 * i] * inverse, out[2 * i + 1] * inverse);
    transpose_quad(words);
    if (merges) columns = make_uint4(words[0], words[1], words[2], words[3]);
    if (exists && merges) *reinterpret_cast<uint4*>(o) = columns;
    if (exists && merges && lane == 0) *lse = sum == 0.0f ? -INFINITY : (row_max + log2f(sum)) * kLn2;
  }
  if (exists && combine.active()) {
    const CombineRows::Row row(combine, b, t, h, g);
    row.store(8 * lane, columns);
  }
}

// Approximate limit on one launch's partial sums, in bytes.
constexpr int64_t kPartialBytes = int64_t{416} << 20;
// The most blocks. The index kernels have tables for all blocks in shared memory; at this number a sequence and group's
// counts [T / 1024, blocks] take half as much memory as its q.
constexpr int kMaxBlocks = 16 * 1024;

// Estimates how large the union of the lists of a tile's 64 rows is, divided by one list's size. The lists are assumed
// to be random, for tokens in the sequence's middle.
double random_union(int64_t tokens, int64_t block_keys, int64_t n, int64_t heads) {
  const double far = static_cast<double>(std::max<int64_t>(n - kNear, 0));
  const double blocks = std::max(static_cast<double>(tokens) / (2.0 * static_cast<double>(block_keys)), far + 1);
  const double in_union = blocks * (1 - std::pow(1 - far / blocks, std::max(64.0 / static_cast<double>(heads), 1.0)));
  return (kNear + in_union) / static_cast<double>(n);
}
// The KV-stationary forward is faster if the union of a tile's lists is larger than this many lists (measured,
// tests/baselines/findings/selected.md).
double union_limit(int64_t dk) { return dk == 64 ? 2.2 : 1.7; }
// The GPU compares the lists only if random lists' union would exceed union_limit by this factor: the comparison costs
// time even if it finds the lists alike.
constexpr double kWorthComparing = 1.8;
bool is_worth_comparing(int64_t tokens, int64_t block_keys, int64_t n, int64_t heads, int64_t dk) {
  return random_union(tokens, block_keys, n, heads) > kWorthComparing * union_limit(dk);
}
// From how many tokens on, at most `most`, it is worth comparing a document's lists.
int64_t least_tokens(int64_t block_keys, int64_t n, int64_t heads, int64_t dk, int64_t most) {
  int64_t low = 0, high = ceil_div(most, block_keys);
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (is_worth_comparing(middle * block_keys, block_keys, n, heads, dk) ? high : low) = middle;
  }
  return std::min(high * block_keys, most);
}
int64_t blocks_of_row(const AttendIn& in, int64_t l_sel) {
  return in.documents.empty() ? ceil_div(end_token(in), l_sel) : in.documents.ids();
}

int range_tokens_of(int64_t tokens, int64_t token_bytes, int64_t groups) {
  const int64_t fit = kPartialBytes / token_bytes, most = std::max<int64_t>(fit / std::min<int64_t>(groups, 2), 128);
  const int64_t whole = most >= kPartTokens ? most / kPartTokens * kPartTokens : most / 128 * 128;
  return static_cast<int>(std::min({whole, tokens, int64_t{16} * kPartTokens}));
}

// Tokens per CTA in the near kernel: two blocks' tokens if two such CTAs with their keys fit on an SM; otherwise one
// block's or fewer.
int near_tokens_of(int64_t dk, int64_t block_keys, int64_t heads) {
  const int64_t most = kItemTiles * kTileRows / heads;
  int64_t tokens = dk == 64 && block_keys <= kTileRows ? 2 * block_keys : block_keys;
  while (tokens > most) tokens /= 2;
  return static_cast<int>(tokens);
}
// The near kernel's shared memory in bytes. It holds the blocks of the CTA's tokens, the block before them, and block
// 0.
template <int kDk, int kDv>
int near_bytes_of(int near_tokens, int64_t block_keys) {
  const int own = near_tokens > block_keys ? 2 : 1;
  return KvStationaryShape<kDk, kDv>::near_bytes(own + 2, static_cast<int>(ceil_div(block_keys, kTileRows)));
}
bool near_blocks_fit(int64_t dk, int64_t block_keys, int64_t heads) {
  const int tokens = near_tokens_of(dk, block_keys, heads), most = 226 * 1024;
  return (dk == 64    ? near_bytes_of<64, 64>(tokens, block_keys)
          : dk == 128 ? near_bytes_of<128, 128>(tokens, block_keys)
                      : near_bytes_of<192, 128>(tokens, block_keys)) <= most - 1024;
}

// Computes the near blocks on a side stream, concurrently with the index and the first gather: it needs neither the
// rest of the index nor partial sums. forward_alike's kernels run there too, because even if they return at once, their
// launches take time.
template <int kDk, int kDv>
void launch_kv_stationary(Context& ctx, const char* op, const KvStationaryArgs& a, const CombineRows& combine,
                          int64_t block_keys, int64_t G, const ForwardAlike& forward_alike) {
  using Shape = KvStationaryShape<kDk, kDv>;
  const int key_tiles = static_cast<int>(ceil_div(block_keys, kTileRows)), parts = a.steps * a.parts;
  const int64_t merged = ceil_div(int64_t{a.launch_steps} * a.range_tokens * G, kMergeThreads / (kDv / 8));
  const dim3 threads(kIndexThreads);
  if (a.share.is_packed()) {
    const int64_t count = int64_t{a.steps / a.ranges / a.lists.groups} * a.share.documents.ids;
    launch(ctx, "clear_compared", kv_stationary_clear_kernel,
           dim3(static_cast<unsigned>(ceil_div(count, int64_t{kIndexThreads}))), threads, 0, a.share.listed, count);
  }
  launch(ctx, "read_lists", kv_stationary_read_lists_kernel, dim3(static_cast<unsigned>(1 + parts)), threads,
         read_lists_bytes(a.lists.blocks), a);
  ForkJoin near(ctx, 1, [&](Context& side) {
    forward_alike(side, a.share);
    launch(
        side, op, fwd_kv_stationary_near_kernel<kDk, kDv>,
        dim3(static_cast<unsigned>(ceil_div(a.lists.blocks * block_keys, int64_t{a.near_tokens}) - a.first_near_part()),
             static_cast<unsigned>(a.steps / a.ranges)),
        dim3(Shape::kNearThreads), near_bytes_of<kDk, kDv>(a.near_tokens, block_keys), a);
  });
  launch(ctx, "plan_items", kv_stationary_plan_items_kernel, dim3(static_cast<unsigned>(a.steps)), threads, 0, a);
  launch(ctx, "fill_entries", kv_stationary_fill_entries_kernel, dim3(static_cast<unsigned>(parts)), threads,
         a.lists.blocks * sizeof(int), a);
  for (int i = 0; i * a.launch_steps < a.steps; ++i) {
    launch(ctx, op,
           block_keys == kTileRows ? fwd_kv_stationary_gather_kernel<kDk, kDv, true>
                                   : fwd_kv_stationary_gather_kernel<kDk, kDv, false>,
           dim3(static_cast<unsigned>(a.items_stride)), dim3(kWarpgroup), Shape::shared_bytes(key_tiles), a, i);
    near.join();
    launch(ctx, op, fwd_kv_stationary_merge_kernel<kDv>, dim3(static_cast<unsigned>(merged)), dim3(kMergeThreads), 0, a,
           combine, i * a.launch_steps);
  }
}

}  // namespace

bool kv_stationary_supports(const AttendOut& out, const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  // whether 16-byte vectors can read the rows
  const auto vector_rows = [](const ConstTensor& t) { return make_view<const bf16>(t).vector; };
  const int64_t dk = in.q.size(3), dv = in.v.size(3), n = block_index.size(3), G = in.q.size(2) / in.k.size(2);
  const bool widths = (dk == 64 && dv == 64) || (dk == 128 && dv == 128) || (dk == 192 && dv == 128);
  return in.q.dtype == DType::bf16 && widths && n <= 64 && (l_sel == 32 || l_sel == 64 || l_sel == 128) &&
         near_blocks_fit(dk, l_sel, G) && G <= 64 && blocks_of_row(in, l_sel) <= kMaxBlocks && vector_rows(in.q) &&
         vector_rows(in.k) && vector_rows(in.v) && vector_rows(out.o) &&
         in.q.size(1) * in.q.stride[1] / 8 < (int64_t{1} << 31);
}

bool kv_stationary_pays(const AttendIn& in, const ConstTensor& block_index, int64_t l_sel) {
  // A part's lists are like those in a row in whose middle the part's middle is.
  return is_worth_comparing(first_token(in) + end_token(in), l_sel, block_index.size(3), in.q.size(2) / in.k.size(2),
                            in.q.size(3));
}

void forward_kv_stationary(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in,
                           const SelectedKeys& keys, int64_t longest, const ForwardAlike& forward_alike,
                           const CombineAlong* combine) {
  const int64_t T = in.q.size(1), bgs = in.k.size(0) * in.k.size(2), G = in.q.size(2) / in.k.size(2);
  const int64_t n = keys.lists.n, dv = in.v.size(3), l_sel = keys.block_keys, blocks = keys.lists.blocks;
  const int64_t token_bytes = n * G * (dv * 2 + 8);
  const int range_tokens = range_tokens_of(T, token_bytes, bgs);
  const int64_t ranges = ceil_div(T, range_tokens), steps = bgs * ranges, parts = ceil_div(range_tokens, kPartTokens);
  const int64_t launch_steps = std::clamp<int64_t>(kPartialBytes / (range_tokens * token_bytes), 1, steps);
  const int64_t launches = ceil_div(steps, launch_steps), entries = range_tokens * n;
  // An item's tokens make whole tiles, so that only a block's last item has a partial tile.
  const int64_t even = kTileRows / std::gcd(int64_t{kTileRows}, G), most = kItemTiles * kTileRows / G;
  const int64_t piece_tokens = std::max(most / even * even, std::min(even, most));
  const int64_t items = launch_steps * (std::min(blocks, entries) + entries / piece_tokens);
  const bool packed = !in.documents.empty();
  Scratch::Scope scope(ctx.scratch);
  const auto ints = [&](int64_t count) { return scope.alloc(DType::i32, {count}).ptr<int32_t>(); };
  const KvStationaryArgs a{
      .q = make_query_view<const bf16>(in, in.q),
      .k = make_view<const bf16>(in.k),
      .v = make_view<const bf16>(in.v),
      .o = make_query_view<bf16>(in, out.o),
      .lse = make_query_view<float>(in, out.lse),
      .lists = keys.lists,
      .n = Divisor(static_cast<int>(n)),
      .heads = Divisor(static_cast<int>(G)),
      .block_keys = Divisor(static_cast<int>(l_sel)),
      .scale_log2 = kLog2e / std::sqrt(static_cast<float>(in.q.size(3))),
      .range_tokens = range_tokens,
      .ranges = static_cast<int>(ranges),
      .steps = static_cast<int>(steps),
      .launch_steps = static_cast<int>(launch_steps),
      .parts = static_cast<int>(parts),
      .piece_tokens = static_cast<int>(piece_tokens),
      .share = {.all = packed ? nullptr : ints(1),
                .listed = packed ? reinterpret_cast<int2*>(ints(2 * in.q.size(0) * blocks)) : nullptr,
                .documents = keys.range.documents,
                .tile_tokens = static_cast<int>(std::max<int64_t>(64 / G, 1)),
                .union_limit = static_cast<float>(union_limit(in.q.size(3))),
                .most_tokens = static_cast<int>(longest)},
      .least_tokens = static_cast<int>(std::min(least_tokens(l_sel, n, G, in.q.size(3), T), longest + 1)),
      .near_tokens = near_tokens_of(in.q.size(3), l_sel, G),
      .near = ints(bgs * keys.lists.tokens),
      .counts = ints(steps * parts * blocks),
      .entries = ints(steps * entries),
      .entry_of = ints(steps * entries),
      .item_counts = ints(launches),
      .items = reinterpret_cast<int4*>(ints(4 * launches * items)),
      .items_stride = static_cast<int>(items),
      .entries_stride = static_cast<int>(entries),
      .partial = scope.alloc(DType::bf16, {launch_steps * entries * G, dv}).ptr<bf16>(),
      .partial_sums = reinterpret_cast<float2*>(scope.alloc(DType::f32, {launch_steps * entries * G, 2}).ptr<float>())};
  const CombineRows rows = combine_rows(combine, keys.lists.first_token);
  if (in.q.size(3) == 64)
    launch_kv_stationary<64, 64>(ctx, op, a, rows, l_sel, G, forward_alike);
  else if (in.q.size(3) == 128)
    launch_kv_stationary<128, 128>(ctx, op, a, rows, l_sel, G, forward_alike);
  else
    launch_kv_stationary<192, 128>(ctx, op, a, rows, l_sel, G, forward_alike);
}

}  // namespace triad::cuda
