// What NSA's branches, dense attention and the selection share on the CPU: a matrix product, its packed operands, and
// the iteration over the keys that a row sees. attend_forward.h and attend_backward.h use it.
//
// All arithmetic is one small product, C[M,N] += A[M,K] B[K,N] with N in blocks one cache line wide (multiply_add). The
// operands are packed beforehand: accumulator type, unit strides, tails padded with zeros. Forward and dq are computed
// per query row, dk and dv per key block. Every sum has one owner and one order, so results don't depend on the thread
// count. Work and memory grow with the attended keys, never with T * T.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels/common/integer.h"
#include "kernels/common/parallel.h"
#include "kernels/nsa/attend.h"

namespace triad::attend_cpu {

// ---- the matrix product that all arithmetic uses ----

template <class A>
inline constexpr int64_t kBlock = 64 / sizeof(A);  // elements in a column block: a cache line, two AVX registers
// n rounded up to whole column blocks.
template <class A>
constexpr int64_t round_up(int64_t n) {
  return triad::round_up(n, kBlock<A>);
}

template <class A>
struct Left {  // a product's left operand: element (m, k) is p[m * row + k * col]
  const A* p;
  int64_t row, col;
};
template <class A>
struct Right {  // the right operand: row k in column block n is the kBlock elements at p + n * block + k * row
  const A* p;
  int64_t row, block;
};

// An AVX register holding elements A, as the compiler's vector type.
template <class A>
struct SimdOf {
  typedef A Type __attribute__((vector_size(32), aligned(sizeof(A)), may_alias));
};

// C[R, kBlocks * kBlock] += A B with C in registers; kFresh: C = A B. A small C is split into several partial sums over
// k, so that about eight independent FMAs hide one's latency.
template <bool kFresh, int R, int kBlocks, class A>
inline void multiply_add_registers(A* c, int64_t c_row, Left<A> a, Right<A> b, int64_t K) {
  using Vec = typename SimdOf<A>::Type;
  constexpr int kVecs = 2 * kBlocks, kWidth = 32 / sizeof(A), kSums = R * kVecs >= 6 ? 1 : 8 / (R * kVecs);
  Vec sum[kSums][R][kVecs] = {};
  for (int r = 0; r < R && !kFresh; ++r)
    for (int v = 0; v < kVecs; ++v) sum[0][r][v] = *reinterpret_cast<const Vec*>(c + r * c_row + v * kWidth);
  const auto add = [&](int h, int64_t k) {
    Vec row[kVecs];
    for (int v = 0; v < kVecs; ++v)
      row[v] = *reinterpret_cast<const Vec*>(b.p + (v / 2) * b.block + k * b.row + (v % 2) * kWidth);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v) sum[h][r][v] += a.p[r * a.row + k * a.col] * row[v];
  };
  int64_t k = 0;
  for (; k + kSums <= K; k += kSums)
    for (int h = 0; h < kSums; ++h) add(h, k + h);
  for (; k < K; ++k) add(0, k);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) {
      for (int h = 1; h < kSums; ++h) sum[0][r][v] += sum[h][r][v];
      *reinterpret_cast<Vec*>(c + r * c_row + v * kWidth) = sum[0][r][v];
    }
}

// C[R,N] += A[R,K] B[K,N] for a few rows, 1 to 4; kFresh: C = A B. The fewer the rows, the more column blocks are
// computed at a time.
template <bool kFresh, int R, class A>
inline void multiply_add_rows(A* c, int64_t c_row, int64_t N, Left<A> a, Right<A> b, int64_t K) {
  constexpr int kTogether = 4 / R;
  int64_t n = 0;
  const int64_t blocks = N / kBlock<A>;
  for (; n + kTogether <= blocks; n += kTogether)
    multiply_add_registers<kFresh, R, kTogether>(c + n * kBlock<A>, c_row, a, {b.p + n * b.block, b.row, b.block}, K);
  for (; n < blocks; ++n)
    multiply_add_registers<kFresh, R, 1>(c + n * kBlock<A>, c_row, a, {b.p + n * b.block, b.row, b.block}, K);
}

// C[M,N] += A[M,K] B[K,N], N a multiple of kBlock; kFresh: C = A B.
template <bool kFresh = false, class A>
inline void multiply_add(A* c, int64_t c_row, int64_t M, int64_t N, Left<A> a, Right<A> b, int64_t K) {
  int64_t m = 0;
  for (; m + 4 <= M; m += 4)
    multiply_add_rows<kFresh, 4>(c + m * c_row, c_row, N, Left<A>{a.p + m * a.row, a.row, a.col}, b, K);
  const Left<A> rest{a.p + m * a.row, a.row, a.col};
  switch (M - m) {
    case 3:
      return multiply_add_rows<kFresh, 3>(c + m * c_row, c_row, N, rest, b, K);
    case 2:
      return multiply_add_rows<kFresh, 2>(c + m * c_row, c_row, N, rest, b, K);
    case 1:
      return multiply_add_rows<kFresh, 1>(c + m * c_row, c_row, N, rest, b, K);
    default:
      return;
  }
}

// ---- operands ----

// A thread's working memory, kept for later calls. take() returns consecutive pieces, each aligned to a cache line;
// `elements` is their total size.
template <class A>
class ThreadBuffer {
 public:
  explicit ThreadBuffer(int64_t elements) {
    static thread_local std::vector<A> storage;
    const size_t n = static_cast<size_t>(elements + kBlock<A>);
    if (storage.size() < n) storage.resize(n);
    next_ = storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) / sizeof(A);
  }
  A* take(int64_t elements) {
    A* p = next_;
    next_ += round_up<A>(elements);
    return p;
  }

 private:
  A* next_;
};

// A strided tensor's rows, [B,T,H,D] or [B,T,H]: (b, t, h) returns a row's address. p is nullptr if the tensor is
// absent.
template <class T>
struct Rows {
  T* p = nullptr;
  int64_t b_stride = 0, t_stride = 0, h_stride = 0;
  template <class TensorType>
  explicit Rows(const TensorType& t) {
    if (t.empty()) return;
    p = t.template ptr<std::remove_const_t<T>>();
    b_stride = t.stride[0], t_stride = t.stride[1], h_stride = t.stride[2];
  }
  T* operator()(int64_t b, int64_t t, int64_t h) const { return p + b * b_stride + t * t_stride + h * h_stride; }
};

// dst[0, round_up(n)) = scale * src[0, n), then zeros
template <class A, class T>
inline void load_row(A* dst, const T* src, int64_t n, A scale = 1) {
  for (int64_t i = 0; i < n; ++i) dst[i] = scale * static_cast<A>(src[i]);
  for (int64_t i = n; i < round_up<A>(n); ++i) dst[i] = 0;
}

// Transposes kBlock keys into a tile: tile[j * kBlock + s] = x[s * x_row + j] for s < count, else 0.
template <class A, class T>
inline void transpose_tile(A* tile, const T* x, int64_t x_row, int64_t count, int64_t D) {
  constexpr int64_t L = kBlock<A>;
  if (count == L) {  // a full tile: no bound check per element
    for (int64_t j = 0; j < D; ++j)
      for (int64_t s = 0; s < L; ++s) tile[j * L + s] = static_cast<A>(x[s * x_row + j]);
    return;
  }
  for (int64_t s = 0; s < L; ++s)
    for (int64_t j = 0; j < D; ++j) tile[j * L + s] = s < count ? static_cast<A>(x[s * x_row + j]) : A{0};
}

// Packs keys [B,S,H,D] as q k^T's right operand: [B,H,tiles,D,kBlock].
template <class T, class A = acc_t<T>>
Tensor pack_tiles(Context& ctx, Scratch::Scope& scope, ConstTensor x) {
  const int64_t B = x.size(0), S = x.size(1), H = x.size(2), D = x.size(3), tiles = round_up<A>(S) / kBlock<A>;
  Tensor packed = scope.alloc(dtype_of<A>, {B, H, tiles, D, kBlock<A>});
  const Rows<const T> rows(x);
  parallel_for(ctx, B * H * tiles, [&](int64_t i) {
    const int64_t s = i % tiles * kBlock<A>, h = i / tiles % H, b = i / tiles / H;
    transpose_tile(packed.ptr<A>() + i * D * kBlock<A>, rows(b, s, h), rows.t_stride, std::min(kBlock<A>, S - s), D);
  });
  return packed;
}

// Packs values [B,S,H,D] as p v's right operand: [B,H,S,D], D rounded up to kBlock.
template <class T, class A = acc_t<T>>
Tensor pack_rows(Context& ctx, Scratch::Scope& scope, ConstTensor x) {
  const int64_t B = x.size(0), S = x.size(1), H = x.size(2), D = x.size(3), width = round_up<A>(D);
  Tensor packed = scope.alloc(dtype_of<A>, {B, H, S, width});
  const Rows<const T> rows(x);
  parallel_for(ctx, B * H * S,
               [&](int64_t i) { load_row(packed.ptr<A>() + i * width, rows(i / S / H, i % S, i / S % H), D); });
  return packed;
}

// Head h in sequence b of a packed tensor, as a product's right operand. tiles_of takes pack_tiles's result: key s is a
// column in column block s / kBlock. rows_of takes pack_rows's result: key s is row s.
template <class A>
Right<A> tiles_of(const Tensor& packed, int64_t b, int64_t h) {
  const int64_t block = packed.size(3) * kBlock<A>;
  return {packed.ptr<A>() + (b * packed.size(1) + h) * packed.size(2) * block, kBlock<A>, block};
}
template <class A>
Right<A> rows_of(const Tensor& packed, int64_t b, int64_t h) {
  const int64_t width = packed.size(3);
  return {packed.ptr<A>() + (b * packed.size(1) + h) * packed.size(2) * width, width, kBlock<A>};
}

// Multiplies M rows with the keys [begin, end) from tiles_of: c[M, end - begin] = a[M,D] k^T. begin and end are
// multiples of kBlock.
template <class A>
inline void scores(A* c, int64_t c_row, int64_t M, const A* a, int64_t a_row, int64_t D, Right<A> tiles, int64_t begin,
                   int64_t end) {
  tiles.p += begin / kBlock<A> * tiles.block;
  multiply_add<true>(c, c_row, M, end - begin, Left<A>{a, a_row, 1}, tiles, D);
}

// ---- keys of a row ----
// A branch is described by a Pattern: which keys a token sees, and which tokens see a key block.
//   void keys(b, t, g, visit) const             calls visit(begin, end) for each key range that token t sees in
//                                               group g; ranges are disjoint and ascending
//   void rows(b, g, begin, end, visit) const    calls visit(t, first, last), t ascending, for each token t that sees
//                                               keys in [begin, end); these are the keys [first, last)
//   int64_t spans() const                       how many spans a sequence's keys are divided into; the
//                                               keys [begin, end) passed to rows() all belong to one span
//   int64_t most_keys() const                   the most keys in a span
//   Span span(b, i) const                       span i's keys in sequence b

struct Span {
  int64_t begin, end;  // keys
};

// The Pattern for a call whose queries are a part of a row (RowPart): `inner` counts queries and keys from the first
// key that a tensor holds.
template <class Pattern>
struct PartPattern {
  Pattern inner;
  int64_t first_query, queries, keys_held;

  template <class Visit>
  void keys(int64_t b, int64_t t, int64_t g, Visit&& visit) const {
    inner.keys(b, first_query + t, g, visit);
  }
  template <class Visit>
  void rows(int64_t b, int64_t g, int64_t begin, int64_t end, Visit&& visit) const {
    inner.rows(b, g, begin, end, [&](int64_t t, int64_t first, int64_t last) {
      if (t >= first_query && t < first_query + queries) visit(t - first_query, first, last);
    });
  }
  int64_t spans() const { return inner.spans(); }
  Span span(int64_t b, int64_t i) const {
    const Span whole = inner.span(b, i);
    return {std::min(whole.begin, keys_held), std::min(whole.end, keys_held)};
  }
  int64_t most_keys() const { return inner.most_keys(); }
};

// The tokens from the first key that the call holds to its last query.
inline int64_t part_tokens(const AttendIn& in) {
  return in.documents.part.first_query - in.documents.part.first_key + in.q.size(1);
}
template <class Pattern>
PartPattern<Pattern> for_part(const Pattern& inner, const AttendIn& in) {
  return {inner, part_tokens(in) - in.q.size(1), in.q.size(1), in.k.size(1)};
}

inline constexpr int64_t kChunk = 128;  // keys whose scores a row holds at a time; scores and operands fit in L1

// Cuts the keys [begin, end) into consecutive pieces, each at most kChunk keys, and calls visit(c0, c1, first, last)
// for each: [first, last) are its keys, and [c0, c1) is that range extended to multiples of kBlock.
template <class A, class Visit>
inline void for_each_chunk(int64_t begin, int64_t end, Visit&& visit) {
  for (int64_t c0 = begin / kBlock<A> * kBlock<A>; c0 < end; c0 += kChunk) {
    const int64_t last = std::min(c0 + kChunk, end);
    visit(c0, round_up<A>(last), std::max(c0, begin), last);
  }
}

// Consecutive keys that a row sees, [first, last), whose scores are in a kChunk-column chunk, from column `at` on.
struct Piece {
  int64_t first, last, at;
};

// Iterates over the keys that token t sees in group g, in chunks of at most kChunk score columns; a chunk may contain
// several short key ranges. For each such piece it calls score(at, c0, c1, first, last), which has to write the keys'
// scores [c0, c1) to the columns from `at` on; only [first, last) are visible. When a chunk is full, and at the end, it
// calls use(pieces, count, columns) with the chunk's pieces and columns.
template <class A, class Pattern, class Score, class Use>
inline void for_each_chunk_of_row(const Pattern& pattern, int64_t b, int64_t t, int64_t g, Score&& score, Use&& use) {
  Piece pieces[kChunk / kBlock<A>];
  int64_t count = 0, columns = 0;
  pattern.keys(b, t, g, [&](int64_t begin, int64_t end) {
    for_each_chunk<A>(begin, end, [&](int64_t c0, int64_t c1, int64_t first, int64_t last) {
      if (columns + (c1 - c0) > kChunk) {
        use(pieces, count, columns);
        count = columns = 0;
      }
      score(columns, c0, c1, first, last);
      pieces[count++] = {first, last, columns + (first - c0)};
      columns += c1 - c0;
    });
  });
  if (count > 0) use(pieces, count, columns);
}

}  // namespace triad::attend_cpu
