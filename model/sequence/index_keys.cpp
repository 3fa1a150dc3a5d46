#include "model/sequence/index_keys.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/backend.h"
#include "kernels/step/reduce.h"
#include "kernels/step/rows.h"

namespace triad {

namespace {

// A contiguous tensor [B,rows,1,d_index] for this rank's rows of `lists`. All ranks allocate as much.
Tensor alloc_keys(const LayerContext& lc, Scratch::Scope& scope, DType dtype, const RowLists& lists, const char* name) {
  int64_t most = 0;
  for (const RowList& list : lists) most = std::max(most, row_count(list));
  const int64_t rows = row_count(lists[static_cast<size_t>(lc.layout.rank)]), width = lc.nsa().d_index;
  const Tensor all = scope.alloc(dtype, {lc.B * most * width}, name);
  return all.slice(0, 0, lc.B * rows * width).view({lc.B, rows, 1, width});
}

}  // namespace

IndexKeys::IndexKeys(Context& ctx, SequenceGroup& group, const LayerContext& lc, Scratch::Scope& scope,
                     const QkvViews& views)
    : layout_(lc.layout), q_(views.index_q) {
  if (q_.empty()) return;
  const RowLists needs = layout_.prefixes();
  keys_ = alloc_keys(lc, scope, q_.dtype, needs, "index keys of the group");
  transfer_ = group.gather(ctx, scope, {{keys_, views.index_k}}, layout_.tokens_by_rank(), needs,
                           fmt::format("keys of the index, layer {}", lc.layer));
}

void IndexKeys::finish(Context& ctx) const {
  if (!q_.empty()) transfer_.finish(ctx);
}

IndexIn IndexKeys::in(int64_t chunk) const {
  if (q_.empty()) return {};
  return {layout_.rows_of_chunk(q_, chunk), keys_.slice(1, 0, layout_.chunk(chunk).end)};
}

std::optional<IndexForward> IndexKeys::forward(int64_t chunk, const Tensor& lse) const {
  if (lse.empty()) return std::nullopt;
  return IndexForward{in(chunk), layout_.rows_of_chunk(lse, chunk)};
}

IndexGradients::IndexGradients(Context& ctx, const LayerContext& lc, Scratch::Scope& scope, const IndexKeys& keys,
                               const IndexBackward* all)
    : lc_(lc), scope_(scope), all_(all) {
  if (all == nullptr) return;
  losses_ = scope.alloc(DType::f64, {lc.layout.chunks()}, "index loss of the chunks");
  zero(ctx, losses_);
  for (int64_t i = 0; i < lc.layout.chunks(); ++i) {
    IndexBackward& chunk = chunks_[static_cast<size_t>(i)].emplace(*all);
    chunk.in = keys.in(i);
    chunk.lse = lc.layout.rows_of_chunk(all->lse, i);
    chunk.dq = lc.layout.rows_of_chunk(all->dq, i);
    chunk.dk = alloc_keys(lc, scope, all->dq.dtype, lc.layout.prefixes(), "gradients of the index's keys")
                   .slice(1, 0, lc.layout.chunk(i).end);
    chunk.loss = losses_.slice(0, i, i + 1);
  }
}

void IndexGradients::reduce(Context& ctx, SequenceGroup& group) const {
  if (all_ == nullptr) return;
  const Tensor &all_keys = chunk(lc_.layout.chunks() - 1)->dk, &first = chunk(0)->dk;
  add_rows(ctx, all_keys.slice(1, 0, first.size(1)), first);
  const RowLists has = lc_.layout.tokens_by_rank(), needs = lc_.layout.prefixes();
  const Tensor sums = alloc_keys(lc_, scope_, all_keys.dtype, has, "sums of the index's keys");
  group.reduce(ctx, scope_, {{sums, all_keys}}, has, needs, fmt::format("gradients of the index, layer {}", lc_.layer))
      .finish(ctx);
  copy_rows(ctx, all_->dk, sums);
  sum_pieces(ctx, all_->loss, losses_, /*add=*/true);
}

}  // namespace triad
