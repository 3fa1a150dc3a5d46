// The token table on the GPU. Forward copies a row per warp: N rows of the table in, N rows out.
// Backward must add rows of equal tokens in one order, and fast even where one token has 10,000 rows. Two launches:
//   1. list: (token, row) side by side by token, the rows of a token in one order. Every CTA lists the tokens that are
//      its own. It reads all tokens, and so counts for itself what the others have before its own: nobody waits for
//      anybody. (cub's radix sort took eight launches.) It compares two at a time. Its own it keeps, so that one look
//      at all is enough but where a token is hot.
//   2. sum: the list is cut into stretches of 256 entries, whatever the tokens are, and those into pieces of some 28. A
//      warp sums the runs of equal tokens of one piece in 32 vectors of columns, always three rows ahead of itself. A
//      run that lies inside of the piece is all its token has: it is added to dw, whose row is asked for along with
//      those of dy. What crosses borders of pieces meets in shared memory, what crosses those of stretches in scratch,
//      where the warp that comes last adds up all parts, in their order.
// Each element of dw is read and written once, where its token occurs. Bytes: dy once, 8 a touched element of dw; at
// 32,768 x 768 (bf16) with 24,046 different tokens 198 MB, 46 us at 4.3 TB/s, a copy of as many bytes 55. Measured on
// an H200: 65.6 to 66.2 us, the list 6 of them and the sums, which go at 3.65 TB/s, 55; a list that compared tokens one
// by one 7, that looked twice 10, rows asked for four at a time and then awaited 57; cub's sort and a third kernel that
// joined the pieces: 110 in all. Adding to dw by red instead of load, add, store took 30 us more; bringing dy to L2
// while the list is made, or telling L2 to forget dy or dw first, nothing or a microsecond or two more; bringing the
// rows that each warp of the sums begins with when the list is put down, a microsecond less at 32,768 rows, at 65,536
// up to four more. No size depends on the tokens, so nothing waits for the host.
#include <algorithm>
#include <limits>

#include "kernels/common/bthd.cuh"
#include "kernels/common/launch_pdl.cuh"
#include "kernels/ops/embedding.h"

namespace triad::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarps = 8;

template <class T, int V>
__global__ void __launch_bounds__(32 * kWarps)
    gather_kernel(T* __restrict__ y, int64_t y_stride, const int32_t* __restrict__ tokens, const T* __restrict__ w,
                  int64_t w_stride, int64_t N, int64_t C) {
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

// Entries of the list: of a warp, and of a CTA. A run that ends soon after a stretch's border is the stretch's before.
constexpr int kPiece = 32, kStretch = 256, kSlack = 32, kSumWarps = (kStretch + kSlack) / kPiece;
constexpr int kListBits = 7;  // 128 CTAs, or as many as there are thousands of tokens
constexpr int kMostListBits = 15;
constexpr int kListWarps = 32, kListBatch = 32;
constexpr int kKept = 64;  // pairs of a warp that it keeps from its look at the tokens; for more it looks again
// Counters of all warps: 80 KiB, beside 16 of what is kept; every card has 99.
constexpr int64_t kMostTokensOfCta = 20 * kListWarps;

// The (token, row) pairs by token, and what concerns the stretches.
struct List {
  int32_t *tokens, *rows;
  int32_t* begins;  // [stretches + 1]
  // Where the run of equal tokens begins and ends that crosses a stretch's first border, if one does.
  int2* crossing;
  int32_t* arrived;  // of the warps that have a part of the run that begins in a stretch [stretches][column groups]
  int32_t N;
  int column_groups;
};

// Of the lanes before this one.
__device__ __forceinline__ int32_t exclusive_sum(int32_t own) {
  const int lane = threadIdx.x % 32;
  int32_t through = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, through, offset);
    if (lane >= offset) through += other;
  }
  return through - own;
}

// A CTA: the tokens that end in its number's `bits` bits: frequent tokens are neighbours in most vocabularies, and so
// they are shared out. Without those bits there are `share` of them. A warp: a 32nd of the rows, in their order.
// counts [warps][share].
__global__ void __launch_bounds__(32 * kListWarps)
    list_kernel(List list, const int32_t* __restrict__ tokens, int rows_of_warp, int bits, int share) {
  extern __shared__ int32_t counts[];
  __shared__ int2 kept[kListWarps][kKept];  // row, token
  __shared__ int32_t of_warp[kListWarps], below_of_warp[kListWarps];
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

  // The first look, 1,024 rows at a time, of which lane i has 32 k + i; so a token's rows come by lane, then k. What it
  // takes is instructions, and tokens are compared in pairs: the owners, 15 bits at most, in halves of a word whose
  // differences never borrow from each other.
  const unsigned lanes_before = (1u << lane) - 1;
  const uint32_t last_cta = (1u << bits) - 1, both = 0x10001u, tops = 0x8000u * both;
  int32_t below = 0, found = 0;
#pragma unroll 1
  for (int32_t base = begin + lane; base - lane < end; base += 32 * kListBatch) {
    uint32_t token[kListBatch];
#pragma unroll
    for (int k = 0; k < kListBatch; ++k) token[k] = base + 32 * k < end ? __ldg(tokens + base + 32 * k) : last_cta;
    uint32_t mine = 0, lower = 0;  // bit k: of token k; counts in halves
#pragma unroll
    for (int k = 0; k < kListBatch / 2; ++k) {
      const uint32_t owners = __byte_perm(token[k], token[kListBatch / 2 + k], 0x5410) & last_cta * both;
      lower += (cta + 0x7fffu) * both - owners >> 15 & both;      // one where the owner is less than cta
      mine |= (tops - (owners ^ cta * both) & tops) >> (15 - k);  // a top where they are the same
    }
    below += (lower & 0xffff) + (lower >> 16);
    const int rows = (end - base + 31) / 32;  // that there are for this lane
    if (rows < kListBatch) mine &= (1u << max(rows, 0)) - 1;
    const int count = __popc(mine);
    int place = found + exclusive_sum(count);
    found = __shfl_sync(kAllLanes, place + count, 31);
    for (; mine != 0; mine &= mine - 1, ++place) {
      const int32_t row = base + 32 * (__ffs(mine) - 1), its_token = __ldg(tokens + row);
      atomicAdd(own + (its_token >> bits), 1);
      if (place < kKept) kept[warp][place] = make_int2(row, its_token);
    }
  }
  below = __reduce_add_sync(kAllLanes, below);
  if (lane == 0) below_of_warp[warp] = below;
  __syncthreads();

  // Counts become places: a token's begins after those of the warps before, the tokens before, and all below.
  const int t = static_cast<int>(threadIdx.x);
  int32_t total = 0;
  if (t < share) {
#pragma unroll 8
    for (int w = 0; w < kListWarps; ++w) total += counts[w * share + t];
  }
  const int32_t through = exclusive_sum(total) + total;  // this token's and those before it, of the warp's tokens
  if (lane == 31) of_warp[warp] = through;
  __syncthreads();
  const int32_t before = __reduce_add_sync(kAllLanes, below_of_warp[lane] + (lane < warp ? of_warp[lane] : 0));
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
    for (int s = (run_begin + kStretch - 1) / kStretch; s * kStretch < run_end; ++s) {
      const int border = s * kStretch;
      const bool whole = border > run_begin && run_end - border <= kSlack;
      list.begins[s] = whole ? run_end : border;
      list.crossing[s] = make_int2(run_begin, run_end);
#pragma unroll 1
      for (int g = 0; g < list.column_groups; ++g) list.arrived[s * list.column_groups + g] = 0;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) list.begins[(N + kStretch - 1) / kStretch] = N;
  __syncthreads();

  const auto put = [&](int32_t row, int32_t token, bool mine) {
    const unsigned same = __match_any_sync(kAllLanes, mine ? token : -1);
    if (mine) {
      const int to = own[token >> bits] + __popc(same & lanes_before);
      list.tokens[to] = token;
      list.rows[to] = row;
    }
    __syncwarp();
    if (mine && same >> lane == 1) own[token >> bits] += __popc(same);  // the last of the same
    __syncwarp();
  };
  if (found <= kKept) {
#pragma unroll 1
    for (int first = 0; first < found; first += 32) {
      const bool mine = first + lane < found;
      const int2 pair = mine ? kept[warp][first + lane] : make_int2(0, 0);
      put(pair.x, pair.y, mine);
    }
  } else {
#pragma unroll 4
    for (int32_t base = begin; base < end; base += 32) {
      const int32_t row = base + lane, token = row < end ? __ldg(tokens + row) : 0;
      const bool mine = row < end && (token & last_cta) == cta;
      if (__any_sync(kAllLanes, mine)) put(row, token, mine);
    }
  }
}

// ---- backward, the sums ----

constexpr int kAhead = 3;  // rows of dy of a warp that are on their way at any time

// What is left of a piece's first and last run, where they cross its borders.
template <int V>
struct Rest {
  float first[V][32], last[V][32];
  bool from_before, ends, goes_on;  // the first run began before; it ends here; the last one goes on
};

// A CTA: one stretch, 32 vectors of columns; a warp: one piece.
template <class T, int V>
__global__ void __launch_bounds__(32 * kSumWarps, 3)
    sum_kernel(float* __restrict__ dw, int64_t dw_stride, float* __restrict__ partials, const T* __restrict__ dy,
               int64_t dy_stride, List list, int64_t C) {
  __shared__ Rest<V> rests[kSumWarps];
  const int group = blockIdx.x % list.column_groups, stretch = blockIdx.x / list.column_groups;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  pdl_wait();
  const int stretch_begin = list.begins[stretch], stretch_end = list.begins[stretch + 1];
  const int piece = (stretch_end - stretch_begin + kSumWarps - 1) / kSumWarps, begin = stretch_begin + warp * piece;
  const int count = max(0, min(piece, stretch_end - begin));
  const int64_t column = (int64_t{group} * 32 + lane) * V;
  const bool inside = column < C;
  Rest<V>& rest = rests[warp];
  using Word = std::conditional_t<V == 1, T, uint4>;
  const auto dw_row = [&](int32_t token) { return dw + token * dw_stride + column; };

  // Lane i holds entry i.
  const int entry = begin + lane;
  const int32_t token = lane < count ? list.tokens[entry] : -1, row = lane < count ? list.rows[entry] : 0;
  const int32_t before = entry > 0 && lane < count ? list.tokens[entry - 1] : -1;
  const int32_t after = entry + 1 < list.N ? list.tokens[entry + 1] : -1;
  const unsigned begins = __ballot_sync(kAllLanes, lane < count && token != before);
  const unsigned ends = __ballot_sync(kAllLanes, lane < count && token != after);
  if (lane == 0) {
    rest.from_before = count > 0 && (begins & 1) == 0;
    rest.ends = ends != 0 || count <= 0;
    rest.goes_on = count > 0 && (ends >> (count - 1) & 1) == 0;
  }
  float sum[V] = {};
  const auto keep = [&](float(&to)[V][32]) {
#pragma unroll
    for (int j = 0; j < V; ++j) to[j][lane] = sum[j];
  };
  // An entry's row of dy and, if a run that began here ends there, that of dw which it is added to.
  struct Entry {
    Word x;
    float dw[V];
  };
  const auto is_direct = [&](int i) { return (ends >> i & 1) != 0 && (begins & ((2u << i) - 1)) != 0; };
  const auto ask = [&](Entry& entry, int i) {
    const int64_t from = __shfl_sync(kAllLanes, row, i);
    const int32_t to = __shfl_sync(kAllLanes, token, i);
    entry.x = Word{};
    if (!inside || i >= count) return;
    entry.x = *reinterpret_cast<const Word*>(dy + from * dy_stride + column);
    if (is_direct(i)) load_vector<V>(entry.dw, dw_row(to));
  };
  const auto add = [&](Entry& entry, int i) {
    if (i >= count) return;  // the same for the whole warp, as is all that follows but `inside`
    const int32_t to = __shfl_sync(kAllLanes, token, i);
    float x[V];
    load_vector<V>(x, reinterpret_cast<const T*>(&entry.x));
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += x[j];
    if ((ends >> i & 1) == 0) return;
    if (!is_direct(i)) {
      keep(rest.first);
    } else if (inside) {
#pragma unroll
      for (int j = 0; j < V; ++j) entry.dw[j] += sum[j];
      store_vector<V>(dw_row(to), entry.dw);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = 0;
  };
  Entry entries[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) ask(entries[k], k);
#pragma unroll 1
  for (int first = 0; first < count; first += kAhead) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      add(entries[k], first + k);
      ask(entries[k], first + k + kAhead);
    }
  }
  if (count > 0 && (ends >> (count - 1) & 1) == 0) keep(begins == 0 ? rest.first : rest.last);
  __syncthreads();

  // Adds the first runs of the pieces from `piece` on, as far as the run goes; false where it goes on in the next
  // stretch.
  const auto add_following = [&](int piece) {
#pragma unroll 1
    for (; piece < kSumWarps; ++piece) {
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += rests[piece].first[j][lane];
      if (rests[piece].ends) return true;
    }
    return false;
  };
  // A part of a run that lies in several stretches. The last of their warps has the sum of all parts, and true.
  const auto join = [&](int2 run, int part) {
    const auto partial = [&](int s, int which) { return partials + (2 * int64_t{s} + which) * C + column; };
    if (inside) store_vector<V>(partial(stretch, part), sum);
    __threadfence();
    __syncwarp();
    const int from = run.x / kStretch, end = (run.y - 1) / kStretch;
    const int last = end * kStretch > run.x && run.y - end * kStretch <= kSlack ? end - 1 : end;
    int32_t arrived = 0;
    if (lane == 0) arrived = atomicAdd(list.arrived + from * list.column_groups + group, 1);
    if (__shfl_sync(kAllLanes, arrived, 0) != last - from) return false;
    __threadfence();
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = 0;
#pragma unroll 4
    for (int s = from; s <= last; ++s) {  // it is the last run of the first of them, and the first of the others
      float x[V] = {};
      if (inside) load_vector<V>(x, partial(s, s == from));
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += x[j];
    }
    return true;
  };
  // What crosses borders: the stretch's first run, if it began before (warp 0's), and each warp's last, if it goes on.
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const bool is_last = part == 1;
    if (is_last ? !rest.goes_on || begins == 0 : warp != 0 || !rest.from_before) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = is_last ? rest.last[j][lane] : 0.0f;
    const int32_t to = __shfl_sync(kAllLanes, token, is_last ? count - 1 : 0);
    const bool ends_here = add_following(is_last ? warp + 1 : 0);
    if (!is_last || !ends_here) {
      if (!join(list.crossing[stretch + part], part)) continue;
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
      launch(ctx, "embedding gather", gather_kernel<T, V>, dim3(ceil_div(N, kWarps)), dim3(32 * kWarps), 0, y.ptr<T>(),
             y.stride[0], tokens.ptr<int32_t>(), w.ptr<T>(), w.stride[0], N, C);
    });
  });
}

void embedding_backward(Context& ctx, Tensor dw, ConstTensor dy, ConstTensor tokens) {
  const int64_t N = dy.size(0), C = dy.size(1), V = dw.size(0), stretches = ceil_div(N, kStretch);
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max() - 32 * kListBatch;  // places and ends are int32
  TRIAD_CHECK(N <= kMostRows, "embedding: {} tokens at once, at most {}", N, kMostRows);
  dispatch_gpu_float(dy.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, dy, dw), [&]<int kLanes>() {
      const int64_t column_groups = ceil_div(C, 32 * kLanes);
      Scratch::Scope scope(ctx.scratch);
      const Tensor listed = scope.alloc(DType::i32, {2, N}), crossing = scope.alloc(DType::i32, {stretches, 2});
      const Tensor begins = scope.alloc(DType::i32, {stretches + 1});
      // One vector a lane or one element: a plan does not know, and there are more groups of single elements.
      const Tensor arrived = scope.alloc(DType::i32, {stretches, ceil_div(C, 32)});
      const Tensor partials = scope.alloc(DType::f32, {stretches, 2, C});
      const List list{listed.ptr<int32_t>(),          listed.ptr<int32_t>() + N,
                      begins.ptr<int32_t>(),          reinterpret_cast<int2*>(crossing.ptr<int32_t>()),
                      arrived.ptr<int32_t>(),         static_cast<int32_t>(N),
                      static_cast<int>(column_groups)};
      int bits = kListBits;
      while (ceil_div(V, int64_t{1} << bits) > kMostTokensOfCta) ++bits;
      TRIAD_CHECK(bits <= kMostListBits, "embedding: a vocabulary of {} tokens, at most {}", V,
                  kMostTokensOfCta << kMostListBits);
      const int64_t share = ceil_div(V, int64_t{1} << bits);
      const size_t counters = kListWarps * static_cast<size_t>(share) * sizeof(int32_t);
      launch(ctx, "embedding list", list_kernel, dim3(N == 0 ? 0 : 1 << bits), dim3(32 * kListWarps), counters, list,
             tokens.ptr<int32_t>(), static_cast<int>(ceil_div(N, 32 * kListWarps) * 32), bits, static_cast<int>(share));
      launch_pdl(ctx, "embedding sum", sum_kernel<T, kLanes>, dim3(stretches * column_groups), dim3(32 * kSumWarps), 0,
                 dw.ptr<float>(), dw.stride[0], partials.ptr<float>(), dy.ptr<T>(), dy.stride[0], list, C);
    });
  });
}

}  // namespace triad::cuda
