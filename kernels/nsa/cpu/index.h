// The index of a taught selection on the CPU (formulas: nsa/index.h), over the keys that a branch's Pattern
// (cpu/attend.h) shows: the student's lse; then the loss and diq per row, and dik per block of keys.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/nsa/cpu/attend_backward.h"
#include "kernels/nsa/cpu/attend_forward.h"
#include "kernels/nsa/index.h"

namespace triad::index_cpu {

using namespace attend_cpu;

// Overwrites index.lse. A work item is one token and group.
template <class T, class Pattern>
void forward(Context& ctx, const IndexForward& index, const Pattern& pattern) {
  using A = acc_t<T>;
  const ConstTensor &q_in = index.in.q, &k_in = index.in.k;
  const int64_t B = q_in.size(0), N = q_in.size(1), groups = q_in.size(2), di = q_in.size(3), q_row = round_up<A>(di);
  const A scale = A{1} / std::sqrt(static_cast<A>(di)), kInf = std::numeric_limits<A>::infinity();
  Scratch::Scope scope(ctx.scratch);
  const Tensor k_tiles = pack_tiles<T>(ctx, scope, k_in);
  const Rows<const T> q_rows(q_in);
  const Rows<A> lse(index.lse);
  parallel_for(ctx, B * N * groups, [&](int64_t i) {
    const int64_t g = i % groups, t = i / groups % N, b = i / groups / N;
    ThreadBuffer<A> buffer(q_row + kChunk);
    A *q = buffer.take(q_row), *s = buffer.take(kChunk);
    load_row(q, q_rows(b, t, g), di, scale);
    A max = -kInf, sum = 0;
    const Right<A> k = tiles_of<A>(k_tiles, b, 0);
    const auto score = [&](int64_t at, int64_t c0, int64_t c1, int64_t first, int64_t last) {
      scores(s + at, kChunk, 1, q, q_row, di, k, c0, c1);
      std::fill(s + at, s + at + (first - c0), -kInf);
      std::fill(s + at + (last - c0), s + at + (c1 - c0), -kInf);
    };
    for_each_chunk_of_row<A>(pattern, b, t, g, score,
                             [&](const Piece*, int64_t, int64_t columns) { softmax_step(s, columns, max, sum); });
    *lse(b, t, g) = sum != 0 ? max + std::log(sum) : -kInf;
  });
}

// The query rows of backward: those of the branch's heads and of the index, scaled, with their lse.
template <class T>
class TaughtRows {
  using A = acc_t<T>;

 public:
  TaughtRows(const Context& ctx, const IndexBackward& index, const AttendIn& in, ConstTensor lse)
      : G(in.q.size(2) / in.k.size(2)),
        dk(in.q.size(3)),
        di(index.in.q.size(3)),
        q_row(round_up<A>(dk)),
        index_row(round_up<A>(di)),
        index_scale(A{1} / std::sqrt(static_cast<A>(di))),
        scale_(A{1} / std::sqrt(static_cast<A>(dk))),
        gradient_scale_(ctx.planning ? A{0} : static_cast<A>(index.scale.value())),
        part_(in.documents.part),
        padding_begin_(index.padding_begin),
        q_(in.q),
        lse_(lse),
        index_q_(index.in.q),
        index_lse_(index.lse) {}

  bool counts(int64_t b, int64_t t) const {
    return padding_begin_.empty() || part_.token(t) < padding_begin_.ptr<int32_t>()[b];
  }
  // Loads the rows of token t and group g: q [G,q_row] and index_q [index_row].
  void load(int64_t b, int64_t t, int64_t g, A* q, A* index_q) const {
    for (int64_t r = 0; r < G; ++r) load_row(q + r * q_row, q_(b, t, g * G + r), dk, scale_);
    load_row(index_q, index_q_(b, t, g), di, index_scale);
  }
  // From scores p [G] rows of `stride` of the heads and s of the index, n of each: teacher P in the first row of p, and
  // ds in s. Returns KL over the columns.
  A learn(int64_t b, int64_t t, int64_t g, A* p, int64_t stride, A* s, int64_t n) const {
    for (int64_t r = 0; r < G; ++r) {
      const A lse = *lse_(b, t, g * G + r);
      A* row = p + r * stride;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) row[j] = exp_of(row[j] - lse);
      if (r == 0) continue;
      for (int64_t j = 0; j < n; ++j) p[j] += row[j];
    }
    const A lse = *index_lse_(b, t, g), share = A{1} / static_cast<A>(G);
    A kl = 0;
    for (int64_t j = 0; j < n; ++j) {
      const A teacher = p[j] * share, log_q = s[j] - lse;
      if (teacher > 0) kl += teacher * (std::log(teacher) - log_q);
      p[j] = teacher;
      s[j] = gradient_scale_ * (exp_of(log_q) - teacher);
    }
    return kl;
  }

  const int64_t G, dk, di, q_row, index_row;
  const A index_scale;

 private:
  const A scale_, gradient_scale_;
  const RowPart part_;
  const ConstTensor padding_begin_;
  const Rows<const T> q_;
  const Rows<const A> lse_;
  const Rows<const T> index_q_;
  const Rows<const A> index_lse_;
};

// diq of every row, overwritten, and the rows' KL [B,N,Hkv]. A work item is one token and group.
template <class T, class Pattern>
void backward_queries(Context& ctx, Tensor dq_out, Tensor row_kl, const TaughtRows<T>& rows, const IndexIn& index,
                      const AttendIn& in, const Pattern& pattern) {
  using A = acc_t<T>;
  const int64_t B = in.q.size(0), N = in.q.size(1), groups = in.k.size(2), G = rows.G;
  Scratch::Scope scope(ctx.scratch);
  const Tensor k_tiles = pack_tiles<T>(ctx, scope, in.k), index_tiles = pack_tiles<T>(ctx, scope, index.k),
               index_rows = pack_rows<T>(ctx, scope, index.k);
  const Rows<A> dq_rows(dq_out), kl_of(row_kl);
  parallel_for(ctx, B * N * groups, [&](int64_t i) {
    const int64_t g = i % groups, t = i / groups % N, b = i / groups / N;
    ThreadBuffer<A> buffer(G * (rows.q_row + kChunk) + 2 * rows.index_row + kChunk);
    A *q = buffer.take(G * rows.q_row), *p = buffer.take(G * kChunk), *index_q = buffer.take(rows.index_row),
      *dq = buffer.take(rows.index_row), *s = buffer.take(kChunk), kl = 0;
    std::fill_n(dq, rows.index_row, A{0});
    if (rows.counts(b, t)) {
      rows.load(b, t, g, q, index_q);
      const Right<A> k = tiles_of<A>(k_tiles, b, g), ik = tiles_of<A>(index_tiles, b, 0),
                     ik_rows = rows_of<A>(index_rows, b, 0);
      const auto score = [&](int64_t at, int64_t c0, int64_t c1, int64_t, int64_t) {
        scores(p + at, kChunk, G, q, rows.q_row, rows.dk, k, c0, c1);
        scores(s + at, kChunk, 1, index_q, rows.index_row, rows.di, ik, c0, c1);
      };
      for_each_chunk_of_row<A>(pattern, b, t, g, score, [&](const Piece* pieces, int64_t count, int64_t) {
        for (const Piece* piece = pieces; piece < pieces + count; ++piece) {
          const int64_t keys = piece->last - piece->first;
          kl += rows.learn(b, t, g, p + piece->at, kChunk, s + piece->at, keys);
          multiply_add(dq, rows.index_row, 1, rows.index_row, Left<A>{s + piece->at, kChunk, 1},
                       Right<A>{ik_rows.p + piece->first * ik_rows.row, ik_rows.row, ik_rows.block}, keys);
        }
      });
    }
    *kl_of(b, t, g) = kl;
    for (int64_t j = 0; j < rows.di; ++j) dq_rows(b, t, g)[j] = rows.index_scale * dq[j];
  });
}

// dik, overwritten. A work item is a block of keys, for all groups one after the other.
template <class T, class Pattern>
void backward_keys(Context& ctx, Tensor dk_out, const TaughtRows<T>& rows, const IndexIn& index, const AttendIn& in,
                   const Pattern& pattern) {
  using A = acc_t<T>;
  constexpr int64_t L = kBlock<A>;
  const int64_t B = in.k.size(0), groups = in.k.size(2), spans = pattern.spans(), G = rows.G;
  const int64_t blocks = ceil_div(pattern.most_keys(), kKeyBlock);
  const Rows<const T> k_in(in.k), index_in(index.k);
  parallel_for(ctx, B * spans * blocks, [&](int64_t i) {
    const int64_t b = i / (spans * blocks);
    const Span span = pattern.span(b, i / blocks % spans);
    const int64_t begin = span.begin + i % blocks * kKeyBlock, end = std::min(begin + kKeyBlock, span.end);
    if (begin >= end) return;
    const int64_t keys = round_up<A>(end - begin);
    ThreadBuffer<A> buffer(keys * (rows.dk + rows.di + 2 * rows.index_row) + G * (rows.q_row + L) + rows.index_row + L +
                           4 * L);
    A *k = buffer.take(keys * rows.dk), *ik = buffer.take(keys * rows.di), *sum = buffer.take(keys * rows.index_row),
      *q = buffer.take(G * rows.q_row), *index_q = buffer.take(rows.index_row), *p = buffer.take(G * L),
      *s = buffer.take(L);
    std::fill_n(sum, keys * rows.index_row, A{0});
    const auto load_tiles = [&](A* tiles, const Rows<const T>& from, int64_t head, int64_t width) {
      for (int64_t at = 0; at < keys; at += L)
        transpose_tile(tiles + at * width, from(b, begin + at, head), from.t_stride, std::min(L, end - begin - at),
                       width);
    };
    load_tiles(ik, index_in, 0, rows.di);
    for (int64_t g = 0; g < groups; ++g) {
      load_tiles(k, k_in, g, rows.dk);
      pattern.rows(b, g, begin, end, [&](int64_t t, int64_t first, int64_t last) {
        if (!rows.counts(b, t)) return;
        rows.load(b, t, g, q, index_q);
        for (int64_t at = 0; at < keys; at += L) {
          const int64_t from = std::max(first - begin - at, int64_t{0}), to = std::min(last - begin - at, L);
          if (from >= to) continue;
          scores(p, L, G, q, rows.q_row, rows.dk, Right<A>{k, L, rows.dk * L}, at, at + L);
          scores(s, L, 1, index_q, rows.index_row, rows.di, Right<A>{ik, L, rows.di * L}, at, at + L);
          rows.learn(b, t, g, p + from, L, s + from, to - from);
          std::fill(s, s + from, A{0});
          std::fill(s + to, s + L, A{0});
          multiply_add(sum + at * rows.index_row, rows.index_row, L, rows.index_row, Left<A>{s, 1, L},
                       Right<A>{index_q, rows.index_row, L}, 1);
        }
      });
    }
    for (int64_t key = begin; key < end; ++key) store_row(dk_out, b, key, 0, sum + (key - begin) * rows.index_row);
  });
}

// lse: of the branch.
template <class T, class Pattern>
void backward(Context& ctx, const IndexBackward& index, const AttendIn& in, ConstTensor lse, const Pattern& pattern) {
  using A = acc_t<T>;
  Scratch::Scope scope(ctx.scratch);
  const Tensor row_kl = scope.alloc(dtype_of<A>, index.lse.shape());
  const TaughtRows<T> rows(ctx, index, in, lse);
  backward_queries<T>(ctx, index.dq, row_kl, rows, index.in, in, pattern);
  backward_keys<T>(ctx, index.dk, rows, index.in, in, pattern);
  parallel_for(ctx, 1, [&](int64_t) {
    double sum = 0;
    for (int64_t i = 0; i < row_kl.numel(); ++i) sum += static_cast<double>(row_kl.ptr<A>()[i]);
    *index.loss.ptr<double>() += sum;
  });
}

}  // namespace triad::index_cpu
