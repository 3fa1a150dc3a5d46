#include "model/context_group.h"

#include <algorithm>

#include "engine/check.h"
#include "kernels/step/rows.h"

namespace triad {

namespace {

// The element of a list, one a rank of a group, that belongs to rank r.
template <class List>
auto& at(List& list, int64_t r) {
  return list[static_cast<size_t>(r)];
}

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

// Allocates as much as the rank that exchanges the most rows, so that the plan of memory of one rank is that of all.
ContextGroup::Pieces ContextGroup::alloc(Scratch::Scope& scope, const std::vector<Rows>& tensors, const RowRanges& from,
                                         const RowRanges& to) const {
  const DType dtype = tensors.at(0).from.dtype;
  std::vector<Shape> row_shapes;
  for (const Rows& t : tensors) row_shapes.emplace_back(t.from.shape()).dim[1] = 1;
  const auto elements = [&](int64_t rows) {
    int64_t n = 0;
    for (const Shape& shape : row_shapes) n += rows * shape.numel();
    return align_up(n);
  };
  int64_t most = 0;
  for (int64_t me = 0; me < ranks_; ++me) {
    int64_t of_rank = 0;
    for (int64_t r = 0; r < ranks_; ++r)
      if (r != me)
        of_rank +=
            elements(overlap(at(from, me), at(to, r)).size()) + elements(overlap(at(from, r), at(to, me)).size());
    most = std::max(most, of_rank);
  }
  const Tensor all = scope.alloc(dtype, {most}, "rows of other ranks");
  int64_t next = 0;
  const auto take = [&](int64_t rows) {
    int64_t n = 0;
    for (const Shape& shape : row_shapes) n += rows * shape.numel();
    Piece piece{all.slice(0, next, next + n), {}};
    int64_t first = next;
    for (Shape shape : row_shapes) {
      shape.dim[1] = rows;
      piece.views.push_back(all.slice(0, first, first + shape.numel()).view(shape));
      first += shape.numel();
    }
    next += elements(rows);
    return piece;
  };
  Pieces pieces;
  for (int64_t r = 0; r < ranks_; ++r) {
    pieces.to.push_back(take(r == rank_ ? 0 : overlap(at(from, rank_), at(to, r)).size()));
    pieces.from.push_back(take(r == rank_ ? 0 : overlap(at(from, r), at(to, rank_)).size()));
  }
  return pieces;
}

void ContextGroup::exchange(Context& ctx, const Pieces& pieces, int64_t most_bytes, const std::string& what) {
  if (ctx.planning || most_bytes == 0) return;
  std::vector<Comm::Piece> sent, received;
  for (int64_t r = 0; r < ranks_; ++r) {
    const auto add = [&](const std::vector<Piece>& of_ranks, std::vector<Comm::Piece>& list) {
      const Tensor& whole = of_ranks[static_cast<size_t>(r)].whole;
      if (whole.numel() > 0) list.push_back({first_ + static_cast<int>(r), whole});
    };
    add(pieces.to, sent);
    add(pieces.from, received);
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
  const Pieces pieces = alloc(scope, tensors, has, needs);
  const RowRange &held = at(has, rank_), &needed = at(needs, rank_);
  for (int64_t r = 0; r < ranks_; ++r) {
    const RowRange sent = overlap(held, at(needs, r));
    for (size_t i = 0; i < tensors.size(); ++i)
      copy_rows(ctx, r == rank_ ? rows_of(tensors[i].to, needed, sent) : at(pieces.to, r).views[i],
                rows_of(tensors[i].from, held, sent));
  }
  exchange(ctx, pieces, most_rows(has, needs) * row_bytes(tensors), what);
  for (int64_t r = 0; r < ranks_; ++r)
    for (size_t i = 0; i < tensors.size() && r != rank_; ++i)
      copy_rows(ctx, rows_of(tensors[i].to, needed, overlap(at(has, r), needed)), at(pieces.from, r).views[i]);
}

void ContextGroup::reduce(Context& ctx, const std::vector<Rows>& tensors, const RowRanges& has, const RowRanges& needs,
                          const std::string& what) {
  Scratch::Scope scope(ctx.scratch);
  const Pieces pieces = alloc(scope, tensors, needs, has);
  const RowRange &held = at(has, rank_), &needed = at(needs, rank_);
  for (int64_t r = 0; r < ranks_; ++r)
    for (size_t i = 0; i < tensors.size() && r != rank_; ++i)
      copy_rows(ctx, at(pieces.to, r).views[i], rows_of(tensors[i].from, needed, overlap(at(has, r), needed)));
  exchange(ctx, pieces, most_rows(has, needs) * row_bytes(tensors), what);
  for (size_t i = 0; i < tensors.size(); ++i) {
    zero(ctx, tensors[i].to);
    for (int64_t r = 0; r < ranks_; ++r) {
      const RowRange added = overlap(held, at(needs, r));
      add_rows(ctx, rows_of(tensors[i].to, held, added),
               r == rank_ ? rows_of(tensors[i].from, needed, added) : ConstTensor(at(pieces.from, r).views[i]));
    }
  }
}

}  // namespace triad
