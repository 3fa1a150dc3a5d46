// The selection by a taught index on the CPU, for training and decoding (formula: nsa/select_index.h).
#pragma once
#include <cmath>
#include <limits>

#include "kernels/nsa/cpu/select.h"

namespace triad::select_cpu {

// Where a row of the index's queries is: its position t in its document, the document's first token among the index's
// keys, and the id of the document's first selection block.
struct IndexPosition {
  int64_t t, first_token = 0, first_block = 0;
};

// Computes block_index as nsa_select_index does. position_of(b, i) returns the IndexPosition of row i of sequence b. A
// work item is one token and group.
template <class T, class PositionOf>
void select_by_index(Context& ctx, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions& o,
                     PositionOf&& position_of) {
  using A = acc_t<T>;
  using namespace attend_cpu;
  const int64_t B = iq.size(0), N = iq.size(1), groups = iq.size(2), di = iq.size(3), q_row = round_up<A>(di);
  const A scale = A{1} / std::sqrt(static_cast<A>(di));
  Scratch::Scope scope(ctx.scratch);
  const Tensor k_tiles = pack_tiles<T>(ctx, scope, ik);
  const Rows<const T> q_rows(iq);
  const Rows<int32_t> lists(block_index);
  parallel_for(ctx, B * N * groups, [&](int64_t i) {
    const int64_t g = i % groups, n = i / groups % N, b = i / groups / N;
    const IndexPosition at = position_of(b, n);
    if (!o.selects(at.t)) return;
    ThreadBuffer<A> buffer(q_row + kChunk);
    A *q = buffer.take(q_row), *s = buffer.take(kChunk);
    load_row(q, q_rows(b, n, g), di, scale);
    const Right<A> k = tiles_of<A>(k_tiles, b, 0);
    const bool any_score = !o.rule(at.t).lists_all();
    list_blocks<A>(lists(b, n, g), at.t, at.first_block, o, [&](int64_t j) {
      A best = -std::numeric_limits<A>::infinity();
      if (!any_score) return best;
      const int64_t begin = at.first_token + j * o.l_sel;
      for_each_chunk<A>(begin, begin + o.l_sel, [&](int64_t c0, int64_t c1, int64_t first, int64_t last) {
        scores(s, kChunk, 1, q, q_row, di, k, c0, c1);
        for (int64_t key = first; key < last; ++key) best = s[key - c0] > best ? s[key - c0] : best;
      });
      return best;
    });
    share_list(lists, b, n, g, at.t, N, o, position_of);
  });
}

}  // namespace triad::select_cpu
