// An attention branch's forward on the CPU: a streaming softmax over the keys that each row sees.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/common/cpu_exp.h"
#include "kernels/nsa/cpu/attend.h"

namespace triad::attend_cpu {

// One streaming softmax step: raises max to the largest s[0, n), replaces s by exp(s - max) and adds it to sum. n is a
// multiple of kBlock. Returns exp(old max - new max), the factor for the caller's earlier sums.
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

// A branch's forward: every row's o and lse (attend.h). A work item is one token and group, with its G query heads.
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
      const bool any = sum[r] != 0;  // true for a NaN sum too, so that a NaN score reaches o
      *lse_out(b, t, g * G + r) = any ? max[r] + std::log(sum[r]) : -kInf;
      const A inverse = any ? A{1} / sum[r] : A{0};
      T* row = o_out(b, t, g * G + r);
      for (int64_t j = 0; j < dv; ++j) row[j] = static_cast<T>(o[r * o_row + j] * inverse);
    }
  });
}

}  // namespace triad::attend_cpu
