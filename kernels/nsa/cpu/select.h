// The selection on the CPU, for training and decoding (formula: nsa/select.h). For each token and group it sums the
// compressed branch's probabilities over the group's heads, computes the selection blocks' scores from these sums
// (paper Eq. 9), and lists the best blocks.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/common/cpu_exp.h"
#include "kernels/nsa/compress.h"
#include "kernels/nsa/cpu/attend.h"
#include "kernels/nsa/select.h"

namespace triad::select_cpu {

// sum[c] = exp(q.k_c - lse) summed over the group's G heads, for the compressed keys c in [first, end), extended to
// whole tiles. q [G,q_row] is scaled by 1 / sqrt(dk); lse_of(r) is head r's lse; p [G,kChunk] is working memory.
template <class A, class LseOf>
inline void sum_of_probabilities(A* sum, const A* q, int64_t q_row, int64_t dk, int64_t G, int64_t first, int64_t end,
                                 attend_cpu::Right<A> tiles, A* p, LseOf&& lse_of) {
  constexpr int64_t kChunk = attend_cpu::kChunk;
  attend_cpu::for_each_chunk<A>(first, end, [&](int64_t c0, int64_t c1, int64_t, int64_t) {
    attend_cpu::scores(p, kChunk, G, q, q_row, dk, tiles, c0, c1);
    std::fill(sum + c0, sum + c1, A{0});
    for (int64_t r = 0; r < G; ++r) {
      const A lse = lse_of(r);
#pragma omp simd
      for (int64_t j = 0; j < c1 - c0; ++j) sum[c0 + j] += exp_of(p[r * kChunk + j] - lse);
    }
  });
}

// shares[s] = s / l: a compressed block's weight if it has s tokens in common with a selection block.
template <class A>
std::vector<A> block_shares(const SelectOptions& o) {
  std::vector<A> shares(static_cast<size_t>(std::min(o.l, o.l_sel) + 1));
  for (size_t s = 0; s < shares.size(); ++s) shares[s] = static_cast<A>(s) / static_cast<A>(o.l);
  return shares;
}

// Selection block j's score (paper Eq. 9): p[c] times overlap(c, j) / l, summed over compressed blocks c < visible,
// where overlap(c, j) counts the tokens that both blocks contain.
template <class A>
inline A block_score(const A* p, int64_t visible, int64_t j, const SelectOptions& o, const A* shares) {
  const int64_t begin = j * o.l_sel, end = begin + o.l_sel;
  const int64_t first = begin < o.l ? 0 : (begin - o.l) / o.d + 1, last = std::min(visible, (end - 1) / o.d + 1);
  A score = 0;
  for (int64_t c = first; c < last; ++c)
    score += shares[std::min(c * o.d + o.l, end) - std::max(c * o.d, begin)] * p[c];
  return score > 0 ? score : A{0};  // a NaN becomes 0, since sorting needs an order
}

// Writes the list for the token at position t in its document (select.h), as ids: block j has the id first_block + j.
// score_of(j) is block j's score.
template <class A, class ScoreOf>
inline void list_blocks(int32_t* list, int64_t t, int64_t first_block, const SelectOptions& o, ScoreOf&& score_of) {
  struct Candidate {
    A score;
    int32_t block;
  };
  static thread_local std::vector<Candidate> candidates;
  const auto rule = o.rule(t);
  int64_t count = 0;
  for (int64_t j = 0; j < rule.init_end; ++j) list[count++] = static_cast<int32_t>(j);

  candidates.clear();
  for (int64_t j = rule.init_end; j < rule.candidate_end; ++j)
    candidates.push_back({score_of(j), static_cast<int32_t>(j)});
  if (!rule.lists_all()) {
    std::nth_element(candidates.begin(), candidates.begin() + rule.slots, candidates.end(),
                     [](auto& x, auto& y) { return x.score != y.score ? x.score > y.score : x.block < y.block; });
    candidates.resize(static_cast<size_t>(rule.slots));
    std::sort(candidates.begin(), candidates.end(), [](auto& x, auto& y) { return x.block < y.block; });
  }
  for (const Candidate& c : candidates) list[count++] = c.block;
  for (int64_t j = rule.local_begin; j <= rule.current; ++j) list[count++] = static_cast<int32_t>(j);
  for (int64_t i = 0; i < count; ++i) list[i] += static_cast<int32_t>(first_block);
  std::fill(list + count, list + o.n_sel, -1);
}

// A token's position t in its document, and the document's first compressed key and first selection block, as numbered
// in the row.
struct Position {
  int64_t t, first_key = 0, first_block = 0;
};
// Copies the list of row i of sequence b, which is at position t of its document, to the rows that share it.
// position_of(b, i) says where row i is.
template <class PositionOf>
inline void share_list(const attend_cpu::Rows<int32_t>& lists, int64_t b, int64_t i, int64_t g, int64_t t, int64_t rows,
                       const SelectOptions& o, PositionOf&& position_of) {
  const int32_t* const list = lists(b, i, g);
  for (int64_t k = 1; k < o.every && i + k < rows && position_of(b, i + k).t == t + k; ++k)
    std::copy(list, list + o.n_sel, lists(b, i + k, g));
}

// Computes block_index as nsa_select does. position_of(b, t) returns the Position for q's row t in sequence b. Rows
// that share the list of a token before the first row keep what they have.
template <class T, class PositionOf>
inline void select(Context& ctx, Tensor block_index, ConstTensor q_in, ConstTensor k_cmp, ConstTensor lse_cmp,
                   const SelectOptions& o, PositionOf&& position_of) {
  using A = acc_t<T>;
  const int64_t B = q_in.size(0), N = q_in.size(1), Hkv = k_cmp.size(2), G = q_in.size(2) / Hkv, dk = q_in.size(3);
  const int64_t q_row = attend_cpu::round_up<A>(dk), sums = attend_cpu::round_up<A>(k_cmp.size(1));
  const A scale = A{1} / std::sqrt(static_cast<A>(dk));
  Scratch::Scope scope(ctx.scratch);
  const Tensor k_tiles = attend_cpu::pack_tiles<T>(ctx, scope, k_cmp);
  const attend_cpu::Rows<const T> q_rows(q_in);
  const attend_cpu::Rows<const A> lse(lse_cmp);
  const attend_cpu::Rows<int32_t> lists(block_index);
  const std::vector<A> shares = block_shares<A>(o);

  parallel_for(ctx, B * N * Hkv, [&](int64_t i) {
    const int64_t g = i % Hkv, t = i / Hkv % N, b = i / Hkv / N;
    const Position at = position_of(b, t);
    if (!o.selects(at.t)) return;
    const bool all_fit = at.t / o.l_sel < o.n_sel;  // all blocks fit into the list: no scores needed
    const int64_t visible = all_fit ? 0 : compressed_length(at.t + 1, o.l, o.d);
    attend_cpu::ThreadBuffer<A> buffer(G * (q_row + attend_cpu::kChunk) + sums);
    A *q = buffer.take(G * q_row), *p = buffer.take(G * attend_cpu::kChunk), *sum = buffer.take(sums);
    if (visible > 0)
      for (int64_t r = 0; r < G; ++r) {
        if (t + kPrefetchTokens < N) prefetch_row(q_rows(b, t + kPrefetchTokens, g * G + r), dk);
        attend_cpu::load_row(q + r * q_row, q_rows(b, t, g * G + r), dk, scale);
      }
    if (visible > 0)
      sum_of_probabilities(sum, q, q_row, dk, G, at.first_key, at.first_key + visible,
                           attend_cpu::tiles_of<A>(k_tiles, b, g), p, [&](int64_t r) { return *lse(b, t, g * G + r); });
    list_blocks<A>(lists(b, t, g), at.t, at.first_block, o,
                   [&](int64_t j) { return block_score(sum + at.first_key, visible, j, o, shares.data()); });
    share_list(lists, b, t, g, at.t, N, o, position_of);
  });
}

}  // namespace triad::select_cpu
