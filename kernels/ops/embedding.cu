// Token embedding on the GPU. Forward: one warp copies one table row. Backward adds equal tokens' rows in a fixed
// order, and distributes the work evenly even if one token has 10,000 rows. It has two launches:
//   1. list:  sorts the (token, row) pairs by token, and equal tokens' rows in a fixed order. Each CTA owns the tokens
//             that have the CTA's number in their low bits. It reads all tokens and counts those owned by lower CTAs,
//             so it knows without communication where its part of the list begins. It compares tokens in pairs and
//             keeps its own in shared memory; only a warp that finds more than kKept reads the tokens twice.
//   2. sum:   cuts the list into stretches of 256 entries regardless of the tokens, and a stretch into pieces of about
//             28, one for each warp. A warp sums the runs of equal tokens in its piece over 32 column vectors, with
//             three dy rows in flight. A run within one piece is complete and is added to dw, whose row was loaded
//             along with dy's. Runs that cross pieces are joined in shared memory, runs that cross stretches in
//             scratch: the last warp to store a part adds all parts in order.
// Each element of dw is read and written once if its token occurs. Bound by memory: dy once, and 8 bytes for each of
// these dw elements. No launch or buffer size depends on the tokens, so the host never waits.
#include <algorithm>
#include <cub/warp/warp_scan.cuh>
#include <limits>

#include "kernels/common/bthd.cuh"
#include "kernels/common/launch_pdl.cuh"
#include "kernels/ops/embedding.h"

namespace triad::cuda {
namespace {

constexpr int kWarps = 8;

template <class T, int V>
__global__ void __launch_bounds__(32 * kWarps)
    embedding_forward_kernel(T* __restrict__ y, int64_t y_stride, const int32_t* __restrict__ tokens,
                             const T* __restrict__ w, int64_t w_stride, int64_t N, int64_t C) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= N) return;
  const T* from = w + tokens[row] * w_stride;
  T* to = y + row * y_stride;
#pragma unroll 4
  for (int64_t c = threadIdx.x % 32 * V; c < C; c += 32 * V) {
    float x[V];
    load_vector<V>(x, from + c);
    store_vector<V>(to + c, x);
  }
}

// ---- backward, the list ----

// List entries for each warp (a piece) and each CTA (a stretch) in the sum. A run of equal tokens that ends at most
// kSlack entries after the border between two stretches belongs to the first one.
constexpr int kPiece = 32, kStretch = 256, kSlack = 32, kSumWarps = (kStretch + kSlack) / kPiece;
constexpr int kListBits = 7;  // a token's low bits that choose its CTA: 128 CTAs, more for large vocabularies
constexpr int kMaxListBits = 15;
constexpr int kListWarps = 32, kListBatch = 32;
constexpr int kKept = 64;  // own pairs that a warp keeps from its first read; with more it reads the tokens again
// The most tokens for one CTA, each with a counter per warp. The counters take at most 80 KiB, and kept pairs 16 KiB;
// every card has 99 KiB.
constexpr int64_t kMaxTokensPerCta = 20 * kListWarps;

// The list: all (token, row) pairs in token order, and how it is cut into stretches.
struct List {
  int32_t *tokens, *rows;
  int32_t* begins;  // [stretches + 1] list index of each stretch's first entry
  // [stretches]: begin and end of the run of equal tokens that crosses each stretch's beginning, if one does.
  int2* crossing;
  // [stretches][column groups]: how many warps have stored a part of the run that begins in the stretch.
  int32_t* arrived;
  int32_t N;
  int column_groups;
};

// Sums `own` over the lanes before this one.
__device__ __forceinline__ int32_t exclusive_sum(int32_t own) {
  using WarpScan = cub::WarpScan<int32_t>;
  typename WarpScan::TempStorage empty;  // a 32-lane scan uses no shared memory
  int32_t before;
  WarpScan(empty).ExclusiveSum(own, before);
  return before;
}

// Sorts the pairs. A CTA owns the tokens whose low `bits` bits are its number, at most `share` different ones. Frequent
// tokens are neighbours in most vocabularies, so this spreads them over CTAs. Each warp reads a 32nd of the rows, in
// order. counts, in shared memory: [warps][share].
__global__ void __launch_bounds__(32 * kListWarps)
    embedding_list_kernel(List list, const int32_t* __restrict__ tokens, int rows_of_warp, int bits, int share) {
  extern __shared__ int32_t counts[];
  __shared__ int2 kept[kListWarps][kKept];  // (row, token) pairs
  __shared__ int32_t warp_totals[kListWarps], below_of_warp[kListWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t cta = blockIdx.x;
  const int32_t N = list.N;
  const int32_t begin = min(int64_t{warp} * rows_of_warp, int64_t{N}),
                end = min(int64_t{begin} + rows_of_warp, int64_t{N});
  int32_t* const own = counts + warp * share;
  pdl_trigger();
#pragma unroll 1
  for (int i = lane; i < share; i += 32) own[i] = 0;
  __syncwarp();

  // First read, 1,024 rows at a time. Lane i has the rows 32 k + i, so a token's rows are ordered by lane, then k. The
  // loop is bound by instructions, so it compares tokens in pairs: their owners, of at most 15 bits, are in the two
  // halves of a word, and differences of the halves never borrow from each other.
  const unsigned lanes_before = (1u << lane) - 1;
  const uint32_t last_cta = (1u << bits) - 1, both = 0x10001u, tops = 0x8000u * both;
  int32_t below = 0, found = 0;
#pragma unroll 1
  for (int32_t base = begin + lane; base - lane < end; base += 32 * kListBatch) {
    uint32_t token[kListBatch];
#pragma unroll
    for (int k = 0; k < kListBatch; ++k) token[k] = base + 32 * k < end ? __ldg(tokens + base + 32 * k) : last_cta;
    uint32_t mine = 0, lower = 0;  // mine: bit k is set if token k is this CTA's; lower: two counts in halves of a word
#pragma unroll
    for (int k = 0; k < kListBatch / 2; ++k) {
      const uint32_t owners = __byte_perm(token[k], token[kListBatch / 2 + k], 0x5410) & last_cta * both;
      lower += (cta + 0x7fffu) * both - owners >> 15 & both;      // adds 1 in each half whose owner is less than cta
      mine |= (tops - (owners ^ cta * both) & tops) >> (15 - k);  // sets a half's top bit if its token's owner is cta
    }
    below += (lower & 0xffff) + (lower >> 16);
    const int rows = (end - base + 31) / 32;  // rows that exist for this lane
    if (rows < kListBatch) mine &= (1u << max(rows, 0)) - 1;
    const int count = __popc(mine);
    int place = found + exclusive_sum(count);
    found = __shfl_sync(kFullWarp, place + count, 31);
    for (; mine != 0; mine &= mine - 1, ++place) {
      const int32_t row = base + 32 * (__ffs(mine) - 1), row_token = __ldg(tokens + row);
      atomicAdd(own + (row_token >> bits), 1);
      if (place < kKept) kept[warp][place] = make_int2(row, row_token);
    }
  }
  below = __reduce_add_sync(kFullWarp, below);
  if (lane == 0) below_of_warp[warp] = below;
  __syncthreads();

  // Counts become positions in the list. A token's entries follow those for all lower CTAs' tokens, for earlier tokens
  // in this CTA, and, for the same token, those from earlier warps.
  const int t = static_cast<int>(threadIdx.x);
  int32_t total = 0;
  if (t < share) {
#pragma unroll 8
    for (int w = 0; w < kListWarps; ++w) total += counts[w * share + t];
  }
  // How many entries this thread's token and those before it among the warp's 32 tokens have.
  const int32_t through = exclusive_sum(total) + total;
  if (lane == 31) warp_totals[warp] = through;
  __syncthreads();
  const int32_t before = __reduce_add_sync(kFullWarp, below_of_warp[lane] + (lane < warp ? warp_totals[lane] : 0));
  if (t < share) {
    const int32_t run_begin = before + through - total, run_end = run_begin + total;
    int32_t next = run_begin;
#pragma unroll 8
    for (int w = 0; w < kListWarps; ++w) {
      const int32_t count = counts[w * share + t];
      counts[w * share + t] = next;
      next += count;
    }
#pragma unroll 1
    for (int s = ceil_div(run_begin, kStretch); s * kStretch < run_end; ++s) {
      const int border = s * kStretch;
      const bool whole = border > run_begin && run_end - border <= kSlack;
      list.begins[s] = whole ? run_end : border;
      list.crossing[s] = make_int2(run_begin, run_end);
#pragma unroll 1
      for (int g = 0; g < list.column_groups; ++g) list.arrived[s * list.column_groups + g] = 0;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) list.begins[ceil_div(N, kStretch)] = N;
  __syncthreads();

  const auto write_entry = [&](int32_t row, int32_t token, bool mine) {
    const unsigned same = __match_any_sync(kFullWarp, mine ? token : -1);
    if (mine) {
      const int to = own[token >> bits] + __popc(same & lanes_before);
      list.tokens[to] = token;
      list.rows[to] = row;
    }
    __syncwarp();
    if (mine && same >> lane == 1) own[token >> bits] += __popc(same);  // last lane that has this token
    __syncwarp();
  };
  if (found <= kKept) {
#pragma unroll 1
    for (int first = 0; first < found; first += 32) {
      const bool mine = first + lane < found;
      const int2 pair = mine ? kept[warp][first + lane] : make_int2(0, 0);
      write_entry(pair.x, pair.y, mine);
    }
  } else {
#pragma unroll 4
    for (int32_t base = begin; base < end; base += 32) {
      const int32_t row = base + lane, token = row < end ? __ldg(tokens + row) : 0;
      const bool mine = row < end && (token & last_cta) == cta;
      if (__any_sync(kFullWarp, mine)) write_entry(row, token, mine);
    }
  }
}

// ---- backward, the sums ----

constexpr int kRowsAhead = 3;  // dy rows that a warp loads ahead

// The partial sums of a piece's first and last runs, if these cross its borders.
template <int V>
struct BorderSums {
  float first[V][32], last[V][32];
  // Whether the first run began in an earlier piece; whether it ends in this piece; whether the last run continues in
  // the next piece.
  bool began_before, ends, continues;
};

// Sums the runs in one stretch over 32 column vectors, by one CTA. Each warp sums one piece.
template <class T, int V>
__global__ void __launch_bounds__(32 * kSumWarps, 3)
    embedding_sum_kernel(float* __restrict__ dw, int64_t dw_stride, float* __restrict__ partials,
                         const T* __restrict__ dy, int64_t dy_stride, List list, int64_t C) {
  __shared__ BorderSums<V> borders[kSumWarps];
  const int group = blockIdx.x % list.column_groups, stretch = blockIdx.x / list.column_groups;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  pdl_wait();
  const int stretch_begin = list.begins[stretch], stretch_end = list.begins[stretch + 1];
  const int piece = ceil_div(stretch_end - stretch_begin, kSumWarps), begin = stretch_begin + warp * piece;
  const int count = max(0, min(piece, stretch_end - begin));
  const int64_t column = (int64_t{group} * 32 + lane) * V;
  const bool inside = column < C;
  BorderSums<V>& border = borders[warp];
  using Word = std::conditional_t<V == 1, T, uint4>;
  const auto dw_row = [&](int32_t token) { return dw + token * dw_stride + column; };

  // Lane i holds entry i in this warp's piece.
  const int entry = begin + lane;
  const int32_t token = lane < count ? list.tokens[entry] : -1, row = lane < count ? list.rows[entry] : 0;
  const int32_t before = entry > 0 && lane < count ? list.tokens[entry - 1] : -1;
  const int32_t after = entry + 1 < list.N ? list.tokens[entry + 1] : -1;
  const unsigned begins = __ballot_sync(kFullWarp, lane < count && token != before);
  const unsigned ends = __ballot_sync(kFullWarp, lane < count && token != after);
  if (lane == 0) {
    border.began_before = count > 0 && (begins & 1) == 0;
    border.ends = ends != 0 || count <= 0;
    border.continues = count > 0 && (ends >> (count - 1) & 1) == 0;
  }
  float sum[V] = {};
  const auto store_border = [&](float(&to)[V][32]) {
#pragma unroll
    for (int j = 0; j < V; ++j) to[j][lane] = sum[j];
  };
  // An entry's dy row. If the entry ends a run that also began in this piece, also the dw row to which the run is
  // added.
  struct Entry {
    Word x;
    float dw[V];
  };
  const auto is_direct = [&](int i) { return (ends >> i & 1) != 0 && (begins & ((2u << i) - 1)) != 0; };
  const auto load_entry = [&](Entry& entry, int i) {
    const int64_t from = __shfl_sync(kFullWarp, row, i);
    const int32_t to = __shfl_sync(kFullWarp, token, i);
    entry.x = Word{};
    if (!inside || i >= count) return;
    entry.x = *reinterpret_cast<const Word*>(dy + from * dy_stride + column);
    if (is_direct(i)) load_vector<V>(entry.dw, dw_row(to));
  };
  const auto add = [&](Entry& entry, int i) {
    if (i >= count) return;  // the same in all of a warp's lanes, as are all branches below except `inside`
    const int32_t to = __shfl_sync(kFullWarp, token, i);
    float x[V];
    load_vector<V>(x, reinterpret_cast<const T*>(&entry.x));
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += x[j];
    if ((ends >> i & 1) == 0) return;
    if (!is_direct(i)) {
      store_border(border.first);
    } else if (inside) {
#pragma unroll
      for (int j = 0; j < V; ++j) entry.dw[j] += sum[j];
      store_vector<V>(dw_row(to), entry.dw);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = 0;
  };
  Entry entries[kRowsAhead];
#pragma unroll
  for (int k = 0; k < kRowsAhead; ++k) load_entry(entries[k], k);
#pragma unroll 1
  for (int first = 0; first < count; first += kRowsAhead) {
#pragma unroll
    for (int k = 0; k < kRowsAhead; ++k) {
      add(entries[k], first + k);
      load_entry(entries[k], first + k + kRowsAhead);
    }
  }
  if (count > 0 && (ends >> (count - 1) & 1) == 0) store_border(begins == 0 ? border.first : border.last);
  __syncthreads();

  // Adds the pieces' first-run sums, from `piece` on, until the run ends; false if it continues in the next stretch.
  const auto add_next_pieces = [&](int piece) {
#pragma unroll 1
    for (; piece < kSumWarps; ++piece) {
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += borders[piece].first[j][lane];
      if (borders[piece].ends) return true;
    }
    return false;
  };
  // Stores this stretch's part of a run that crosses stretches. Returns true, with all parts summed, in the warp that
  // stores the last part.
  const auto join_stretches = [&](int2 run, int part) {
    const auto partial = [&](int s, int which) { return partials + (2 * int64_t{s} + which) * C + column; };
    if (inside) store_vector<V>(partial(stretch, part), sum);
    __threadfence();
    __syncwarp();
    const int from = run.x / kStretch, end = (run.y - 1) / kStretch;
    const int last = end * kStretch > run.x && run.y - end * kStretch <= kSlack ? end - 1 : end;
    int32_t arrived = 0;
    if (lane == 0) arrived = atomicAdd(list.arrived + from * list.column_groups + group, 1);
    if (__shfl_sync(kFullWarp, arrived, 0) != last - from) return false;
    __threadfence();
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = 0;
      // The run is the last one in its first stretch and the first one in the others.
#pragma unroll 4
    for (int s = from; s <= last; ++s) {
      float x[V] = {};
      if (inside) load_vector<V>(x, partial(s, s == from));
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += x[j];
    }
    return true;
  };
  // Completes the runs that cross borders: the stretch's first run, if it began in an earlier stretch (by warp 0), and
  // each warp's last run, if it continues in the next piece.
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const bool is_last = part == 1;
    if (is_last ? !border.continues || begins == 0 : warp != 0 || !border.began_before) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = is_last ? border.last[j][lane] : 0.0f;
    const int32_t to = __shfl_sync(kFullWarp, token, is_last ? count - 1 : 0);
    const bool ends_here = add_next_pieces(is_last ? warp + 1 : 0);
    if (!is_last || !ends_here) {
      if (!join_stretches(list.crossing[stretch + part], part)) continue;
    }
    if (!inside) continue;
    float total[V];
    load_vector<V>(total, dw_row(to));
#pragma unroll
    for (int j = 0; j < V; ++j) total[j] += sum[j];
    store_vector<V>(dw_row(to), total);
  }
}

}  // namespace

void embedding_forward(Context& ctx, Tensor y, ConstTensor tokens, ConstTensor w) {
  const int64_t N = y.size(0), C = y.size(1);
  dispatch_gpu_float(y.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, y, w), [&]<int V>() {
      launch(ctx, "embedding gather", embedding_forward_kernel<T, V>, dim3(ceil_div(N, kWarps)), dim3(32 * kWarps), 0,
             y.ptr<T>(), y.stride[0], tokens.ptr<int32_t>(), w.ptr<T>(), w.stride[0], N, C);
    });
  });
}

void embedding_backward(Context& ctx, Tensor dw, ConstTensor dy, ConstTensor tokens) {
  const int64_t N = dy.size(0), C = dy.size(1), V = dw.size(0), stretches = ceil_div(N, kStretch);
  // Positions in the list are int32.
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max() - 32 * kListBatch;
  TRIAD_CHECK(N <= kMaxRows, "embedding: {} tokens at once, at most {}", N, kMaxRows);
  dispatch_gpu_float(dy.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, dy, dw), [&]<int kLanes>() {
      const int64_t column_groups = ceil_div(C, 32 * kLanes);
      Scratch::Scope scope(ctx.scratch);
      const Tensor listed = scope.alloc(DType::i32, {2, N}), crossing = scope.alloc(DType::i32, {stretches, 2});
      const Tensor begins = scope.alloc(DType::i32, {stretches + 1});
      // Sized for one element per lane, which has more column groups than vectors have, since a plan does not know the
      // alignment.
      const Tensor arrived = scope.alloc(DType::i32, {stretches, ceil_div(C, 32)});
      const Tensor partials = scope.alloc(DType::f32, {stretches, 2, C});
      const List list{listed.ptr<int32_t>(),          listed.ptr<int32_t>() + N,
                      begins.ptr<int32_t>(),          reinterpret_cast<int2*>(crossing.ptr<int32_t>()),
                      arrived.ptr<int32_t>(),         static_cast<int32_t>(N),
                      static_cast<int>(column_groups)};
      int bits = kListBits;
      while (ceil_div(V, int64_t{1} << bits) > kMaxTokensPerCta) ++bits;
      TRIAD_CHECK(bits <= kMaxListBits, "embedding: a vocabulary of {} tokens, at most {}", V,
                  kMaxTokensPerCta << kMaxListBits);
      const int64_t share = ceil_div(V, int64_t{1} << bits);
      const size_t counters = kListWarps * static_cast<size_t>(share) * sizeof(int32_t);
      launch(ctx, "embedding list", embedding_list_kernel, dim3(N == 0 ? 0 : 1 << bits), dim3(32 * kListWarps),
             counters, list, tokens.ptr<int32_t>(), static_cast<int>(ceil_div(N, 32 * kListWarps) * 32), bits,
             static_cast<int>(share));
      launch_pdl(ctx, "embedding sum", embedding_sum_kernel<T, kLanes>, dim3(stretches * column_groups),
                 dim3(32 * kSumWarps), 0, dw.ptr<float>(), dw.stride[0], partials.ptr<float>(), dy.ptr<T>(),
                 dy.stride[0], list, C);
    });
  });
}

}  // namespace triad::cuda
