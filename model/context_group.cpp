#include "model/context_group.h"

#include <algorithm>

#include "engine/check.h"
#include "kernels/step/rows.h"

namespace triad {

namespace {

// The rows `range`, if any, of a tensor that holds the rows `held`.
template <class TensorType>
TensorType rows_of(const TensorType& t, const RowRange& held, const RowRange& range) {
  const int64_t begin = range.size() == 0 ? 0 : range.begin - held.begin;
  return t.slice(1, begin, begin + range.size());
}

// The most rows that two ranks exchange, over all pairs.
int64_t most_rows(const RowRanges& has, const RowRanges& needs) {
  int64_t most = 0;
  for (size_t i = 0; i < has.size(); ++i)
    for (size_t j = 0; j < needs.size(); ++j)
      if (i != j) most = std::max(most, overlap(has[i], needs[j]).size());
  return most;
}

// The bytes of one row of all tensors of a call, in all sequences.
int64_t row_bytes(const std::vector<ContextGroup::Rows>& tensors) {
  int64_t bytes = 0;
  for (const ContextGroup::Rows& t : tensors) {
    Shape shape = t.from.shape();
    shape.dim[1] = 1;
    bytes += shape.numel() * size_of(t.from.dtype);
  }
  return bytes;
}

}  // namespace

ContextGroup::ContextGroup(const Context& ctx, Comm& comm, const ContextLayout& layout)
    : comm_(comm),
      ranks_(layout.ranks),
      rank_(layout.rank),
      first_(comm.rank() - comm.rank() % static_cast<int>(layout.ranks)) {
  TRIAD_CHECK(comm.world() % ranks_ == 0, "{} ranks in groups of {}", comm.world(), ranks_);
  if (!ctx.planning) event_.emplace(ctx.device);
}

ContextGroup::Piece ContextGroup::alloc(Scratch::Scope& scope, const std::vector<Rows>& tensors, int64_t rows) {
  std::vector<Shape> shapes;
  int64_t elements = 0;
  for (const Rows& t : tensors) {
    Shape& shape = shapes.emplace_back(t.from.shape());
    shape.dim[1] = rows;
    elements += shape.numel();
  }
  Piece piece{scope.alloc(tensors.at(0).from.dtype, {elements}, "rows of other ranks"), {}};
  int64_t at = 0;
  for (const Shape& shape : shapes) {
    piece.views.push_back(piece.whole.slice(0, at, at + shape.numel()).view(shape));
    at += shape.numel();
  }
  return piece;
}

void ContextGroup::exchange(Context& ctx, const std::vector<Piece>& to, const std::vector<Piece>& from,
                            int64_t most_bytes, const std::string& what) {
  if (ctx.planning || most_bytes == 0) return;
  std::vector<Comm::Piece> sent, received;
  for (int64_t r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    const auto add = [&](const Piece& piece, std::vector<Comm::Piece>& list) {
      if (piece.whole.numel() > 0) list.push_back({first_ + static_cast<int>(r), piece.whole});
    };
    add(to[static_cast<size_t>(r)], sent);
    add(from[static_cast<size_t>(r)], received);
  }
  event_->record(ctx.stream);
  event_->block(comm_.stream());
  comm_.exchange(sent, received, most_bytes, what);
  event_->record(comm_.stream());
  event_->block(ctx.stream);
}

void ContextGroup::gather(Context& ctx, const std::vector<Rows>& tensors, const RowRanges& has, const RowRanges& needs,
                          const std::string& what) {
  Scratch::Scope scope(ctx.scratch);
  const auto me = static_cast<size_t>(rank_);
  std::vector<Piece> to, from;
  for (size_t r = 0; r < has.size(); ++r) {
    const RowRange sent = overlap(has[me], needs[r]), received = overlap(has[r], needs[me]);
    to.push_back(alloc(scope, tensors, r == me ? 0 : sent.size()));
    from.push_back(alloc(scope, tensors, r == me ? 0 : received.size()));
    for (size_t i = 0; i < tensors.size(); ++i) {
      const ConstTensor rows = rows_of(tensors[i].from, has[me], sent);
      copy_rows(ctx, r == me ? rows_of(tensors[i].to, needs[me], sent) : to[r].views[i], rows);
    }
  }
  exchange(ctx, to, from, most_rows(has, needs) * row_bytes(tensors), what);
  for (size_t r = 0; r < has.size(); ++r) {
    if (r == me) continue;
    for (size_t i = 0; i < tensors.size(); ++i)
      copy_rows(ctx, rows_of(tensors[i].to, needs[me], overlap(has[r], needs[me])), from[r].views[i]);
  }
}

void ContextGroup::reduce(Context& ctx, const std::vector<Rows>& tensors, const RowRanges& has, const RowRanges& needs,
                          const std::string& what) {
  Scratch::Scope scope(ctx.scratch);
  const auto me = static_cast<size_t>(rank_);
  std::vector<Piece> to, from;
  for (size_t r = 0; r < has.size(); ++r) {
    const RowRange sent = overlap(has[r], needs[me]), received = overlap(has[me], needs[r]);
    to.push_back(alloc(scope, tensors, r == me ? 0 : sent.size()));
    from.push_back(alloc(scope, tensors, r == me ? 0 : received.size()));
    for (size_t i = 0; i < tensors.size() && r != me; ++i)
      copy_rows(ctx, to[r].views[i], rows_of(tensors[i].from, needs[me], sent));
  }
  exchange(ctx, to, from, most_rows(has, needs) * row_bytes(tensors), what);
  for (size_t i = 0; i < tensors.size(); ++i) {
    zero(ctx, tensors[i].to);
    for (size_t r = 0; r < has.size(); ++r) {
      const RowRange added = overlap(has[me], needs[r]);
      const ConstTensor rows = r == me ? rows_of(tensors[i].from, needs[me], added) : ConstTensor(from[r].views[i]);
      add_rows(ctx, rows_of(tensors[i].to, has[me], added), rows);
    }
  }
}

}  // namespace triad
