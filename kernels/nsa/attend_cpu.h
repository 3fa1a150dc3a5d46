// The CPU's attention over ranges of keys, shared by NSA's three branches (and its score product by the selection).
// All arithmetic is one small product, C[M,N] += A[M,K] B[K,N] with N in blocks of a cache line (multiply_add). The
// operands are copied beforehand into its layout: wider type, no strides, tails filled with zeros.
// Forward and dq go by query rows, dk and dv by blocks of keys: every sum has one owner and one order, so results do
// not depend on the number of threads, and work and memory follow the keys attended, never T*T.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/cpu_exp.h"
#include "kernels/common/parallel.h"
#include "kernels/nsa/attend.h"

namespace triad::attend_cpu {

// ---- the product ----

template <class A>
inline constexpr int64_t kBlock = 64 / sizeof(A);  // columns of a block: a cache line, two AVX registers
template <class A>
constexpr int64_t round_up(int64_t n) {
  return (n + kBlock<A> - 1) / kBlock<A> * kBlock<A>;
}

template <class A>
struct Left {  // element (m, k) at p[m * row + k * col]
  const A* p;
  int64_t row, col;
};
template <class A>
struct Right {  // row k of column block n: kBlock elements at p + n * block + k * row
  const A* p;
  int64_t row, block;
};

template <class A>
struct SimdOf {
  typedef A Type __attribute__((vector_size(32), aligned(sizeof(A)), may_alias));
};

// C[R, kBlocks * kBlock] += A B with C in registers; kFresh: C = A B. Where C is small, several sums of it run side by
// side, so that about eight are in flight and hide the latency of an FMA.
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

// R rows of C: few rows take more columns at a time.
template <bool kFresh, int R, class A>
inline void multiply_add_rows(A* c, int64_t c_row, int64_t N, Left<A> a, Right<A> b, int64_t K) {
  constexpr int kWide = 4 / R;
  int64_t n = 0;
  const int64_t blocks = N / kBlock<A>;
  for (; n + kWide <= blocks; n += kWide)
    multiply_add_registers<kFresh, R, kWide>(c + n * kBlock<A>, c_row, a, {b.p + n * b.block, b.row, b.block}, K);
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

// A thread's working memory, kept from call to call; pieces start on a cache line.
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

// Rows of a [B,T,H,D] or [B,T,H] tensor.
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

// kBlock keys side by side: tile[j * kBlock + s] = x[s * x_row + j] for s < count, else 0.
template <class A, class T>
inline void transpose_tile(A* tile, const T* x, int64_t x_row, int64_t count, int64_t D) {
  constexpr int64_t L = kBlock<A>;
  if (count == L) {  // whole rows of the tile at a time
    for (int64_t j = 0; j < D; ++j)
      for (int64_t s = 0; s < L; ++s) tile[j * L + s] = static_cast<A>(x[s * x_row + j]);
    return;
  }
  for (int64_t s = 0; s < L; ++s)
    for (int64_t j = 0; j < D; ++j) tile[j * L + s] = s < count ? static_cast<A>(x[s * x_row + j]) : A{0};
}

// Keys as the right operand of q k^T: [B,H,tiles,D,kBlock].
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

// Values as the right operand of p v: [B,H,S,D], D rounded up.
template <class T, class A = acc_t<T>>
Tensor pack_rows(Context& ctx, Scratch::Scope& scope, ConstTensor x) {
  const int64_t B = x.size(0), S = x.size(1), H = x.size(2), D = x.size(3), width = round_up<A>(D);
  Tensor packed = scope.alloc(dtype_of<A>, {B, H, S, width});
  const Rows<const T> rows(x);
  parallel_for(ctx, B * H * S,
               [&](int64_t i) { load_row(packed.ptr<A>() + i * width, rows(i / S / H, i % S, i / S % H), D); });
  return packed;
}

// The packed keys of one head as a right operand. Tiles: key s starts block s / kBlock. Rows: key s is row s.
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

// c[M, end - begin] = a [M,D] times the keys [begin, end) of tiles; begin and end are multiples of kBlock.
template <class A>
inline void scores(A* c, int64_t c_row, int64_t M, const A* a, int64_t a_row, int64_t D, Right<A> tiles, int64_t begin,
                   int64_t end) {
  tiles.p += begin / kBlock<A> * tiles.block;
  multiply_add<true>(c, c_row, M, end - begin, Left<A>{a, a_row, 1}, tiles, D);
}

// ---- forward ----
// A branch is a Pattern: which keys a row sees, and which rows see a block of keys.
//   void keys(b, t, g, visit) const           calls visit(begin, end) for the ranges of keys of row t: disjoint,
//   ascending void rows(b, g, begin, end, visit) const  calls visit(t, first, last), t ascending, for each t that sees
//   keys of
//                                             [begin, end), namely [first, last)
//   int64_t span() const                      rows() is asked for blocks that do not cross a multiple of it

inline constexpr int64_t kChunk = 128;  // keys whose scores exist at a time: they stay in L1 with what they multiply

// Replaces scores s[0, n), n a multiple of kBlock, by exp(s - max); returns the factor by which earlier sums shrink.
template <class A>
inline A softmax_step(A* s, int64_t n, A& max, A& sum) {
  constexpr int64_t L = kBlock<A>;
  A lane[L];
  std::fill_n(lane, L, max);
  for (int64_t i = 0; i < n; i += L)
    for (int64_t j = 0; j < L; ++j) lane[j] = s[i + j] > lane[j] ? s[i + j] : lane[j];
  for (int64_t half = L / 2; half > 0; half /= 2)
    for (int64_t j = 0; j < half; ++j) lane[j] = lane[j + half] > lane[j] ? lane[j + half] : lane[j];
  const A new_max = lane[0], shrink = exp_of(max - new_max);
  std::fill_n(lane, L, A{0});
  for (int64_t i = 0; i < n; i += L) {
#pragma omp simd
    for (int64_t j = 0; j < L; ++j) {
      s[i + j] = exp_of(s[i + j] - new_max);
      lane[j] += s[i + j];
    }
  }
  for (int64_t half = L / 2; half > 0; half /= 2)
    for (int64_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  sum = sum * shrink + lane[0];
  max = new_max;
  return shrink;
}

// Calls visit(c0, c1, first, last) for pieces of [begin, end): [first, last) are its keys, [c0, c1) whole tiles around.
template <class A, class Visit>
inline void for_each_chunk(int64_t begin, int64_t end, Visit&& visit) {
  for (int64_t c0 = begin / kBlock<A> * kBlock<A>; c0 < end; c0 += kChunk) {
    const int64_t last = std::min(c0 + kChunk, end);
    visit(c0, round_up<A>(last), std::max(c0, begin), last);
  }
}

// Keys [first, last) of a row, and where in the chunk the score of the first stands.
struct Piece {
  int64_t first, last, at;
};

// The keys of row t, a chunk at a time: ranges that are short share one. score(at, c0, c1, first, last) for each piece
// of it, [first, last) its keys and [c0, c1) the tiles whose scores go to columns at ..; then
// use(pieces, count, columns).
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

template <class T, class Pattern>
void forward(Context& ctx, const AttendOut& out, const AttendIn& in, const Pattern& pattern) {
  using A = acc_t<T>;
  const int64_t B = in.q.size(0), N = in.q.size(1), Hq = in.q.size(2), Hkv = in.k.size(2), G = Hq / Hkv;
  const int64_t dk = in.q.size(3), dv = in.v.size(3), q_row = round_up<A>(dk), o_row = round_up<A>(dv);
  const A scale = A{1} / std::sqrt(static_cast<A>(dk)), kInf = std::numeric_limits<A>::infinity();
  Scratch::Scope scope(ctx.scratch);
  const Tensor k_tiles = pack_tiles<T>(ctx, scope, in.k), v_rows = pack_rows<T>(ctx, scope, in.v);
  const Rows<const T> q_in(in.q);
  const Rows<T> o_out(out.o);
  const Rows<A> lse_out(out.lse);

  parallel_for(ctx, B * N * Hkv, [&](int64_t i) {
    const int64_t g = i % Hkv, t = i / Hkv % N, b = i / Hkv / N;
    ThreadBuffer<A> buffer(G * (q_row + o_row + kChunk) + 2 * round_up<A>(G));
    A *q = buffer.take(G * q_row), *o = buffer.take(G * o_row), *p = buffer.take(G * kChunk);
    A *max = buffer.take(G), *sum = buffer.take(G);
    for (int64_t r = 0; r < G; ++r) {
      if (t + kPrefetchTokens < N) prefetch_row(q_in(b, t + kPrefetchTokens, g * G + r), dk);
      load_row(q + r * q_row, q_in(b, t, g * G + r), dk, scale);
    }
    std::fill_n(o, G * o_row, A{0});
    std::fill_n(max, G, -kInf);
    std::fill_n(sum, G, A{0});

    const Right<A> k = tiles_of<A>(k_tiles, b, g), v = rows_of<A>(v_rows, b, g);
    const auto score = [&](int64_t at, int64_t c0, int64_t c1, int64_t first, int64_t last) {
      scores(p + at, kChunk, G, q, q_row, dk, k, c0, c1);
      for (int64_t r = 0; r < G; ++r) {
        A* row = p + r * kChunk + at;
        std::fill(row, row + (first - c0), -kInf);
        std::fill(row + (last - c0), row + (c1 - c0), -kInf);
      }
    };
    for_each_chunk_of_row<A>(pattern, b, t, g, score, [&](const Piece* pieces, int64_t count, int64_t columns) {
      for (int64_t r = 0; r < G; ++r) {
        const A shrink = softmax_step(p + r * kChunk, columns, max[r], sum[r]);
        if (shrink != A{1})
          for (int64_t j = 0; j < o_row; ++j) o[r * o_row + j] *= shrink;
      }
      for (const Piece* piece = pieces; piece < pieces + count; ++piece)
        multiply_add(o, o_row, G, o_row, Left<A>{p + piece->at, kChunk, 1},
                     Right<A>{v.p + piece->first * v.row, v.row, v.block}, piece->last - piece->first);
    });
    for (int64_t r = 0; r < G; ++r) {
      const bool any = sum[r] != 0;  // also where a NaN kept max at -inf
      *lse_out(b, t, g * G + r) = any ? max[r] + std::log(sum[r]) : -kInf;
      const A inverse = any ? A{1} / sum[r] : A{0};
      T* row = o_out(b, t, g * G + r);
      for (int64_t j = 0; j < dv; ++j) row[j] = static_cast<T>(o[r * o_row + j] * inverse);
    }
  });
}

// ---- backward ----

inline constexpr int64_t kKeyBlock = 32;  // keys whose dk and dv one piece of work owns
inline constexpr int64_t kRowBatch = 64;  // query rows it takes at a time

// What backward reads of the query rows, side by side in the layout of the products: for each (b, group, token, head of
// the group) q / sqrt(dk), the branch's upstream gradient gate * dout, lse and delta.
template <class T>
struct GradRows {
  using A = acc_t<T>;
  int64_t G, dk, dv, q_row, o_row, tokens, groups;
  A scale;
  Tensor q, dout, facts;  // [B,Hkv,N,G,q_row], [B,Hkv,N,G,o_row], [2,B,Hkv,N,G]
  GradRows(Context& ctx, Scratch::Scope& scope, const AttendGradIn& grad, const AttendIn& in)
      : G(in.q.size(2) / in.k.size(2)),
        dk(in.q.size(3)),
        dv(in.v.size(3)),
        q_row(round_up<A>(dk)),
        o_row(round_up<A>(dv)),
        tokens(in.q.size(1)),
        groups(in.k.size(2)),
        scale(A{1} / std::sqrt(static_cast<A>(dk))),
        q(scope.alloc(dtype_of<A>, {in.q.size(0), groups, tokens, G, q_row})),
        dout(scope.alloc(dtype_of<A>, {in.q.size(0), groups, tokens, G, o_row})),
        facts(scope.alloc(dtype_of<A>, {2, in.q.size(0), groups, tokens, G})) {
    const Rows<const T> q_in(in.q), dout_in(grad.dout);
    const Rows<const A> gate(grad.gate), delta(grad.delta), lse(grad.lse);
    parallel_for(ctx, in.q.size(0) * tokens, [&](int64_t i) {
      const int64_t b = i / tokens, t = i % tokens;
      for (int64_t g = 0; g < groups; ++g) {
        const A upstream = gate.p == nullptr ? A{1} : *gate(b, t, g);
        for (int64_t r = 0; r < G; ++r) {
          if (t + kPrefetchTokens < tokens) {
            prefetch_row(q_in(b, t + kPrefetchTokens, g * G + r), dk);
            prefetch_row(dout_in(b, t + kPrefetchTokens, g * G + r), dv);
          }
          load_row(q_at(b, t, g) + r * q_row, q_in(b, t, g * G + r), dk, scale);
          load_row(dout_at(b, t, g) + r * o_row, dout_in(b, t, g * G + r), dv, upstream);
          lse_at(b, t, g)[r] = *lse(b, t, g * G + r);
          delta_at(b, t, g)[r] = *delta(b, t, g * G + r);
        }
      }
    });
  }
  // Where the G rows of token t begin; those of the next token follow.
  A* q_at(int64_t b, int64_t t, int64_t g) const { return q.ptr<A>() + row(b, t, g) * q_row; }
  A* dout_at(int64_t b, int64_t t, int64_t g) const { return dout.ptr<A>() + row(b, t, g) * o_row; }
  A* lse_at(int64_t b, int64_t t, int64_t g) const { return facts.ptr<A>() + row(b, t, g); }
  A* delta_at(int64_t b, int64_t t, int64_t g) const { return lse_at(b, t, g) + facts.stride[0]; }

 private:
  int64_t row(int64_t b, int64_t t, int64_t g) const { return ((b * groups + g) * tokens + t) * G; }
};

// s := p = exp(s - lse), dp := ds = p * (dp - delta). Where p is 1 no other key is left, and ds is 0: dp - delta would
// be what rounding leaves of two equal numbers.
template <class A>
inline void softmax_gradient(A* s, A* dp, int64_t n, A lse, A delta) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    s[j] = exp_of(s[j] - lse);
    dp[j] = s[j] >= A{1} ? A{0} : s[j] * (dp[j] - delta);
  }
}

template <class T, class Pattern>
void backward_queries(Context& ctx, Tensor dq_out, const GradRows<T>& rows, const AttendIn& in,
                      const Pattern& pattern) {
  using A = acc_t<T>;
  const int64_t B = in.q.size(0), N = in.q.size(1), Hkv = in.k.size(2);
  const int64_t G = rows.G, dk = rows.dk, dv = rows.dv, q_row = rows.q_row, o_row = rows.o_row;
  Scratch::Scope scope(ctx.scratch);
  const Tensor k_tiles = pack_tiles<T>(ctx, scope, in.k), v_tiles = pack_tiles<T>(ctx, scope, in.v);
  const Tensor k_rows = pack_rows<T>(ctx, scope, in.k);
  const Rows<A> dq_rows(dq_out);

  parallel_for(ctx, B * N * Hkv, [&](int64_t i) {
    const int64_t g = i % Hkv, t = i / Hkv % N, b = i / Hkv / N;
    ThreadBuffer<A> buffer(G * (q_row + 2 * kChunk));
    A *dq = buffer.take(G * q_row), *p = buffer.take(G * kChunk), *ds = buffer.take(G * kChunk);
    const A *q = rows.q_at(b, t, g), *dout = rows.dout_at(b, t, g);
    const A *lse = rows.lse_at(b, t, g), *delta = rows.delta_at(b, t, g);
    std::fill_n(dq, G * q_row, A{0});
    const Right<A> kt = tiles_of<A>(k_tiles, b, g), vt = tiles_of<A>(v_tiles, b, g), k = rows_of<A>(k_rows, b, g);
    const auto score = [&](int64_t at, int64_t c0, int64_t c1, int64_t, int64_t) {
      scores(p + at, kChunk, G, q, q_row, dk, kt, c0, c1);
      scores(ds + at, kChunk, G, dout, o_row, dv, vt, c0, c1);
    };
    for_each_chunk_of_row<A>(pattern, b, t, g, score, [&](const Piece* pieces, int64_t count, int64_t columns) {
      for (int64_t r = 0; r < G; ++r) softmax_gradient(p + r * kChunk, ds + r * kChunk, columns, lse[r], delta[r]);
      for (const Piece* piece = pieces; piece < pieces + count; ++piece)
        multiply_add(dq, q_row, G, q_row, Left<A>{ds + piece->at, kChunk, 1},
                     Right<A>{k.p + piece->first * k.row, k.row, k.block}, piece->last - piece->first);
    });
    for (int64_t r = 0; r < G; ++r) axpy(dq_rows(b, t, g * G + r), rows.scale, dq + r * q_row, dk);
  });
}

template <class A>
inline void store_row(const Tensor& to, int64_t b, int64_t t, int64_t h, const A* from) {
  dispatch_float(to.dtype, [&]<class T>() {
    T* row = Rows<T>(to)(b, t, h);
    for (int64_t j = 0; j < to.size(3); ++j) row[j] = static_cast<T>(static_cast<acc_t<T>>(from[j]));
  });
}

// Rows of some tokens, one after the other.
template <class A>
struct RowBatch {
  A *q, *dout, *lse, *delta;
};

// dk and dv of a block of keys: the rows that see it come by in batches, in order of t.
template <class T, class Pattern>
void backward_keys(Context& ctx, Tensor dk_out, Tensor dv_out, const GradRows<T>& rows, const AttendIn& in,
                   const Pattern& pattern) {
  using A = acc_t<T>;
  constexpr int64_t L = kBlock<A>;
  const int64_t B = in.k.size(0), S = in.k.size(1), Hkv = in.k.size(2);
  const Rows<const T> k_in(in.k), v_in(in.v);
  const int64_t G = rows.G, dk = rows.dk, dv = rows.dv, q_row = rows.q_row, o_row = rows.o_row;
  const int64_t span = std::max<int64_t>(1, std::min(pattern.span(), S)), spans = (S + span - 1) / span;
  const int64_t pieces = (span + kKeyBlock - 1) / kKeyBlock, batch = std::max<int64_t>(1, kRowBatch / G);

  parallel_for(ctx, B * Hkv * spans * pieces, [&](int64_t i) {
    const int64_t g = i / (spans * pieces) % Hkv, b = i / (spans * pieces) / Hkv,
                  span_begin = i / pieces % spans * span;
    const int64_t begin = span_begin + i % pieces * kKeyBlock;
    const int64_t end = std::min({begin + kKeyBlock, span_begin + span, S}), keys = round_up<A>(end - begin);
    if (begin >= end) return;
    ThreadBuffer<A> buffer((2 * keys + batch * G) * (q_row + o_row) + 2 * batch * G * L + 2 * round_up<A>(batch * G));
    A *k = buffer.take(keys * dk), *dk_sum = buffer.take(keys * q_row);
    A *v = buffer.take(keys * dv), *dv_sum = buffer.take(keys * o_row);
    A *p = buffer.take(batch * G * L), *ds = buffer.take(batch * G * L);
    RowBatch<A> own{buffer.take(batch * G * q_row), buffer.take(batch * G * o_row), buffer.take(batch * G),
                    buffer.take(batch * G)};
    for (int64_t s = 0; s < keys; s += L) {
      const int64_t count = std::min(L, end - begin - s);
      transpose_tile(k + s * dk, k_in(b, begin + s, g), k_in.t_stride, count, dk);
      transpose_tile(v + s * dv, v_in(b, begin + s, g), v_in.t_stride, count, dv);
    }
    std::fill_n(dk_sum, keys * q_row, A{0});
    std::fill_n(dv_sum, keys * o_row, A{0});

    struct Seen {
      int64_t t, first, last;  // token, and the keys it sees, counted from `begin`
    };
    Seen seen[kRowBatch];
    int64_t tokens = 0;
    auto add_batch = [&] {
      const int64_t M = tokens * G, t0 = seen[0].t;
      // Rows of tokens that follow each other are used where they are, others are brought together.
      const bool in_place = seen[tokens - 1].t - t0 == tokens - 1;
      for (int64_t i = 0; i < tokens && !in_place; ++i) {
        const int64_t t = seen[i].t;
        std::copy_n(rows.q_at(b, t, g), G * q_row, own.q + i * G * q_row);
        std::copy_n(rows.dout_at(b, t, g), G * o_row, own.dout + i * G * o_row);
        std::copy_n(rows.lse_at(b, t, g), G, own.lse + i * G);
        std::copy_n(rows.delta_at(b, t, g), G, own.delta + i * G);
      }
      const auto [q, dout, lse, delta] = in_place ? RowBatch<A>{rows.q_at(b, t0, g), rows.dout_at(b, t0, g),
                                                                rows.lse_at(b, t0, g), rows.delta_at(b, t0, g)}
                                                  : own;
      for (int64_t s = 0; s < keys; s += L) {
        scores(p, L, M, q, q_row, dk, Right<A>{k, L, dk * L}, s, s + L);
        scores(ds, L, M, dout, o_row, dv, Right<A>{v, L, dv * L}, s, s + L);
        for (int64_t m = 0; m < M; ++m) {
          const Seen& token = seen[m / G];
          softmax_gradient(p + m * L, ds + m * L, L, lse[m], delta[m]);
          if (token.first <= s && s + L <= token.last) continue;
          for (int64_t j = 0; j < L; ++j)
            if (s + j < token.first || s + j >= token.last) p[m * L + j] = ds[m * L + j] = 0;
        }
        multiply_add(dk_sum + s * q_row, q_row, L, q_row, Left<A>{ds, 1, L}, Right<A>{q, q_row, L}, M);
        multiply_add(dv_sum + s * o_row, o_row, L, o_row, Left<A>{p, 1, L}, Right<A>{dout, o_row, L}, M);
      }
      tokens = 0;
    };
    pattern.rows(b, g, begin, end, [&](int64_t t, int64_t first, int64_t last) {
      seen[tokens++] = {t, first - begin, last - begin};
      if (tokens == batch) add_batch();
    });
    if (tokens > 0) add_batch();
    for (int64_t s = begin; s < end; ++s) {
      store_row(dk_out, b, s, g, dk_sum + (s - begin) * q_row);
      store_row(dv_out, b, s, g, dv_sum + (s - begin) * o_row);
    }
  });
}

template <class T, class Pattern>
void backward(Context& ctx, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
              const Pattern& pattern) {
  Scratch::Scope scope(ctx.scratch);
  const GradRows<T> rows(ctx, scope, grad, in);
  backward_queries<T>(ctx, out.dq, rows, in, pattern);
  backward_keys<T>(ctx, out.dk, out.dv, rows, in, pattern);
}

}  // namespace triad::attend_cpu
