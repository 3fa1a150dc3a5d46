// An attention branch's backward on the CPU: dq per query row, then dk and dv per key block.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/common/cpu_exp.h"
#include "kernels/common/integer.h"
#include "kernels/nsa/cpu/attend.h"

namespace triad::attend_cpu {

inline constexpr int64_t kKeyBlock = 32;  // keys per dk and dv work item
inline constexpr int64_t kRowBatch = 64;  // query rows that such a work item multiplies at a time

// What backward reads from the query rows, packed for the products. For each sequence, group, token and head in the
// group: q / sqrt(dk), the branch's o gradient, which is gate * dout, and the softmax statistics lse and delta.
template <class T>
struct GradRows {
  using A = acc_t<T>;
  int64_t G, dk, dv, q_row, o_row, tokens, groups;
  A scale, alone;              // alone: of softmax_gradient
  Tensor q, dout, statistics;  // [B,Hkv,N,G,q_row], [B,Hkv,N,G,o_row], [2,B,Hkv,N,G]: lse, delta
  GradRows(Context& ctx, Scratch::Scope& scope, const AttendGradIn& grad, const AttendIn& in)
      : G(in.q.size(2) / in.k.size(2)),
        dk(in.q.size(3)),
        dv(in.v.size(3)),
        q_row(round_up<A>(dk)),
        o_row(round_up<A>(dv)),
        tokens(in.q.size(1)),
        groups(in.k.size(2)),
        scale(A{1} / std::sqrt(static_cast<A>(dk))),
        alone(grad.through_lse ? std::numeric_limits<A>::infinity() : A{1}),
        q(scope.alloc(dtype_of<A>, {in.q.size(0), groups, tokens, G, q_row})),
        dout(scope.alloc(dtype_of<A>, {in.q.size(0), groups, tokens, G, o_row})),
        statistics(scope.alloc(dtype_of<A>, {2, in.q.size(0), groups, tokens, G})) {
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
  // The address of token t's G rows. Token t + 1's rows follow them.
  A* q_at(int64_t b, int64_t t, int64_t g) const { return q.ptr<A>() + row(b, t, g) * q_row; }
  A* dout_at(int64_t b, int64_t t, int64_t g) const { return dout.ptr<A>() + row(b, t, g) * o_row; }
  A* lse_at(int64_t b, int64_t t, int64_t g) const { return statistics.ptr<A>() + row(b, t, g); }
  A* delta_at(int64_t b, int64_t t, int64_t g) const { return lse_at(b, t, g) + statistics.stride[0]; }

 private:
  int64_t row(int64_t b, int64_t t, int64_t g) const { return ((b * groups + g) * tokens + t) * G; }
};

// Replaces s by p = exp(s - lse) and dp by ds = p * (dp - delta). If p is 1, which is `alone`, the row sees no other
// key with weight, so ds is exactly 0; dp - delta would leave two equal numbers' rounding error. alone: infinity if
// delta has a part of lse's gradient, which is then ds.
template <class A>
inline void softmax_gradient(A* s, A* dp, int64_t n, A lse, A delta, A alone) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    s[j] = exp_of(s[j] - lse);
    dp[j] = s[j] >= alone ? A{0} : s[j] * (dp[j] - delta);
  }
}

// Adds every row's dq to dq_out. A work item is one token and group, with its G query heads.
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
      for (int64_t r = 0; r < G; ++r)
        softmax_gradient(p + r * kChunk, ds + r * kChunk, columns, lse[r], delta[r], rows.alone);
      for (const Piece* piece = pieces; piece < pieces + count; ++piece)
        multiply_add(dq, q_row, G, q_row, Left<A>{ds + piece->at, kChunk, 1},
                     Right<A>{k.p + piece->first * k.row, k.row, k.block}, piece->last - piece->first);
    });
    for (int64_t r = 0; r < G; ++r) axpy(dq_rows(b, t, g * G + r), rows.scale, dq + r * q_row, dk);
  });
}

// Stores dk's or dv's row (b, t, h), rounded to the tensor's dtype.
template <class A>
inline void store_row(const Tensor& to, int64_t b, int64_t t, int64_t h, const A* from) {
  dispatch_float(to.dtype, [&]<class T>() {
    T* row = Rows<T>(to)(b, t, h);
    for (int64_t j = 0; j < to.size(3); ++j) row[j] = static_cast<T>(static_cast<acc_t<T>>(from[j]));
  });
}

// dk and dv for the keys [begin, end) in sequence b and group g. add() collects the tokens that see these keys, in
// ascending order; when a batch is full, the products with its query rows are added to the sums. store() adds the last
// batch and writes the sums.
template <class T>
class KeyBlockGradient {
  using A = acc_t<T>;
  static constexpr int64_t L = kBlock<A>;

 public:
  KeyBlockGradient(const GradRows<T>& rows, const AttendIn& in, int64_t b, int64_t g, int64_t begin, int64_t end)
      : rows_(rows),
        b_(b),
        g_(g),
        begin_(begin),
        end_(end),
        keys_(round_up<A>(end - begin)),
        batch_(std::max<int64_t>(1, kRowBatch / rows.G)),
        buffer_((2 * keys_ + batch_ * rows.G) * (rows.q_row + rows.o_row) + 2 * batch_ * rows.G * L +
                2 * round_up<A>(batch_ * rows.G)),
        k_(buffer_.take(keys_ * rows.dk)),
        dk_sum_(buffer_.take(keys_ * rows.q_row)),
        v_(buffer_.take(keys_ * rows.dv)),
        dv_sum_(buffer_.take(keys_ * rows.o_row)),
        p_(buffer_.take(batch_ * rows.G * L)),
        ds_(buffer_.take(batch_ * rows.G * L)),
        copy_{buffer_.take(batch_ * rows.G * rows.q_row), buffer_.take(batch_ * rows.G * rows.o_row),
              buffer_.take(batch_ * rows.G), buffer_.take(batch_ * rows.G)} {
    const Rows<const T> k_in(in.k), v_in(in.v);
    for (int64_t s = 0; s < keys_; s += L) {
      const int64_t count = std::min(L, end - begin - s);
      transpose_tile(k_ + s * rows.dk, k_in(b, begin + s, g), k_in.t_stride, count, rows.dk);
      transpose_tile(v_ + s * rows.dv, v_in(b, begin + s, g), v_in.t_stride, count, rows.dv);
    }
    std::fill_n(dk_sum_, keys_ * rows.q_row, A{0});
    std::fill_n(dv_sum_, keys_ * rows.o_row, A{0});
  }

  // Token t sees the keys [first, last) within [begin, end).
  void add(int64_t t, int64_t first, int64_t last) {
    seen_[tokens_++] = {t, first - begin_, last - begin_};
    if (tokens_ == batch_) add_batch();
  }

  void store(const Tensor& dk_out, const Tensor& dv_out) {
    if (tokens_ > 0) add_batch();
    for (int64_t s = begin_; s < end_; ++s) {
      store_row(dk_out, b_, s, g_, dk_sum_ + (s - begin_) * rows_.q_row);
      store_row(dv_out, b_, s, g_, dv_sum_ + (s - begin_) * rows_.o_row);
    }
  }

 private:
  struct Seen {
    int64_t t, first, last;  // a token; the keys that it sees, [first, last), counted from the block's first key
  };
  struct Batch {
    A *q, *dout, *lse, *delta;  // G consecutive rows per token, as in GradRows
  };

  // Returns the collected tokens' query rows: where GradRows has them if the tokens are consecutive, else copies.
  Batch gather() const {
    const int64_t G = rows_.G, t0 = seen_[0].t;
    if (seen_[tokens_ - 1].t - t0 == tokens_ - 1)
      return {rows_.q_at(b_, t0, g_), rows_.dout_at(b_, t0, g_), rows_.lse_at(b_, t0, g_), rows_.delta_at(b_, t0, g_)};
    for (int64_t i = 0; i < tokens_; ++i) {
      const int64_t t = seen_[i].t;
      std::copy_n(rows_.q_at(b_, t, g_), G * rows_.q_row, copy_.q + i * G * rows_.q_row);
      std::copy_n(rows_.dout_at(b_, t, g_), G * rows_.o_row, copy_.dout + i * G * rows_.o_row);
      std::copy_n(rows_.lse_at(b_, t, g_), G, copy_.lse + i * G);
      std::copy_n(rows_.delta_at(b_, t, g_), G, copy_.delta + i * G);
    }
    return copy_;
  }

  // Computes p and ds for the batch's M query rows and the L keys from s on (counted from the block's first key). Both
  // are 0 where a row doesn't see a key.
  void softmax_tile(const Batch& batch, int64_t M, int64_t s) const {
    scores(p_, L, M, batch.q, rows_.q_row, rows_.dk, Right<A>{k_, L, rows_.dk * L}, s, s + L);
    scores(ds_, L, M, batch.dout, rows_.o_row, rows_.dv, Right<A>{v_, L, rows_.dv * L}, s, s + L);
    for (int64_t m = 0; m < M; ++m) {
      const Seen& token = seen_[m / rows_.G];
      softmax_gradient(p_ + m * L, ds_ + m * L, L, batch.lse[m], batch.delta[m], rows_.alone);
      if (token.first <= s && s + L <= token.last) continue;
      for (int64_t j = 0; j < L; ++j)
        if (s + j < token.first || s + j >= token.last) p_[m * L + j] = ds_[m * L + j] = 0;
    }
  }

  // Adds the products with the collected tokens' query rows to dk's and dv's sums, and starts a new batch.
  void add_batch() {
    const int64_t M = tokens_ * rows_.G, q_row = rows_.q_row, o_row = rows_.o_row;
    const Batch batch = gather();
    for (int64_t s = 0; s < keys_; s += L) {
      softmax_tile(batch, M, s);
      multiply_add(dk_sum_ + s * q_row, q_row, L, q_row, Left<A>{ds_, 1, L}, Right<A>{batch.q, q_row, L}, M);
      multiply_add(dv_sum_ + s * o_row, o_row, L, o_row, Left<A>{p_, 1, L}, Right<A>{batch.dout, o_row, L}, M);
    }
    tokens_ = 0;
  }

  const GradRows<T>& rows_;
  // keys_: key count, rounded up to a multiple of L; batch_: the most tokens in a batch.
  const int64_t b_, g_, begin_, end_, keys_, batch_;
  ThreadBuffer<A> buffer_;
  A *const k_, *const dk_sum_, *const v_, *const dv_sum_;  // k_, v_: transposed tiles; sums [keys, row]
  A *const p_, *const ds_;                                 // [batch * G, L]
  const Batch copy_;
  Seen seen_[kRowBatch];
  int64_t tokens_ = 0;
};

// Computes dk and dv. A work item is a block of at most kKeyBlock keys in one span, for one sequence and group.
template <class T, class Pattern>
void backward_keys(Context& ctx, Tensor dk_out, Tensor dv_out, const GradRows<T>& rows, const AttendIn& in,
                   const Pattern& pattern) {
  const int64_t B = in.k.size(0), Hkv = in.k.size(2), spans = pattern.spans();
  const int64_t blocks = ceil_div(pattern.most_keys(), kKeyBlock);  // blocks per span, at most
  parallel_for(ctx, B * Hkv * spans * blocks, [&](int64_t i) {
    const int64_t g = i / (spans * blocks) % Hkv, b = i / (spans * blocks) / Hkv;
    const Span span = pattern.span(b, i / blocks % spans);
    const int64_t begin = span.begin + i % blocks * kKeyBlock, end = std::min(begin + kKeyBlock, span.end);
    if (begin >= end) return;
    KeyBlockGradient<T> gradient(rows, in, b, g, begin, end);
    pattern.rows(b, g, begin, end, [&](int64_t t, int64_t first, int64_t last) { gradient.add(t, first, last); });
    gradient.store(dk_out, dv_out);
  });
}

// A branch's backward (attend.h): dq is added to, dk and dv are overwritten.
template <class T, class Pattern>
void backward(Context& ctx, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
              const Pattern& pattern) {
  Scratch::Scope scope(ctx.scratch);
  const GradRows<T> rows(ctx, scope, grad, in);
  backward_queries<T>(ctx, out.dq, rows, in, pattern);
  backward_keys<T>(ctx, out.dk, out.dv, rows, in, pattern);
}

}  // namespace triad::attend_cpu
