#include "model/context_group.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/step/rows.h"
#include "model/exchange_meter.h"

namespace triad {

namespace {

// The element of a list, one a rank of a group, that belongs to rank r.
template <class List>
auto& at(List& list, int64_t r) {
  return list[static_cast<size_t>(r)];
}

// Consecutive rows that two lists have in common: where they begin in the tensor of the one and of the other.
struct Common {
  int64_t in_has, in_needs, rows;
};
std::vector<Common> common_rows(const RowList& has, const RowList& needs) {
  std::vector<Common> all;
  int64_t has_at = 0;
  for (const RowRange& h : has) {
    int64_t needs_at = 0;
    for (const RowRange& n : needs) {
      const int64_t begin = std::max(h.begin, n.begin), end = std::min(h.end, n.end);
      if (begin < end) all.push_back({has_at + begin - h.begin, needs_at + begin - n.begin, end - begin});
      needs_at += n.size();
    }
    has_at += h.size();
  }
  return all;
}

template <class TensorType>
TensorType rows_of(const TensorType& t, int64_t begin, int64_t rows) {
  return t.slice(1, begin, begin + rows);
}

// The elements of `rows` rows of a tensor, in all sequences.
int64_t elements_of(const ConstTensor& t, int64_t rows) {
  Shape shape = t.shape();
  shape.dim[1] = rows;
  return shape.numel();
}

int64_t bytes_of(const std::vector<Comm::Piece>& pieces) {
  int64_t bytes = 0;
  for (const Comm::Piece& piece : pieces) bytes += piece.data.bytes();
  return bytes;
}

}  // namespace

ContextGroup::ContextGroup(const Context& ctx, Comm& group, const ContextLayout& layout)
    : comm_(group), ranks_(layout.ranks), rank_(layout.rank) {
  TRIAD_CHECK(group.world() == ranks_, "{} ranks share sequences, and their group has {}", ranks_, group.world());
  if (!ctx.planning) event_.emplace(ctx.device);
}

// Allocates as much as the rank that exchanges the most rows, so that the plan of memory of one rank is that of all.
template <class Sends>
ContextGroup::Pieces ContextGroup::alloc(Scratch::Scope& scope, const std::vector<Rows>& tensors, Sends&& sends) const {
  const auto elements = [&](const std::vector<Common>& ranges) {
    int64_t n = 0;
    for (const Common& range : ranges)
      for (const Rows& t : tensors) n += elements_of(t.from, range.rows);
    return n;
  };
  int64_t most = 0;
  for (int64_t me = 0; me < ranks_; ++me) {
    int64_t of_rank = 0;
    for (int64_t r = 0; r < ranks_; ++r)
      if (r != me) of_rank += align_up(elements(sends(me, r))) + align_up(elements(sends(r, me)));
    most = std::max(most, of_rank);
  }
  const Tensor all = scope.alloc(tensors.at(0).from.dtype, {most}, "rows of other ranks");
  int64_t next = 0;
  const auto take = [&](const std::vector<Common>& ranges) {
    Piece piece;
    int64_t end = next;
    for (const Common& range : ranges) {
      std::vector<Tensor>& views = piece.views.emplace_back();
      for (const Rows& t : tensors) {
        Shape shape = t.from.shape();
        shape.dim[1] = range.rows;
        views.push_back(all.slice(0, end, end + shape.numel()).view(shape));
        end += shape.numel();
      }
    }
    piece.whole = all.slice(0, next, end);
    next += align_up(end - next);
    return piece;
  };
  Pieces pieces;
  for (int64_t r = 0; r < ranks_; ++r) {
    pieces.to.push_back(r == rank_ ? Piece{} : take(sends(rank_, r)));
    pieces.from.push_back(r == rank_ ? Piece{} : take(sends(r, rank_)));
  }
  return pieces;
}

void ContextGroup::exchange(Context& ctx, const Pieces& pieces, int64_t most_bytes, const std::string& what) {
  if (most_bytes == 0) return;
  std::vector<Comm::Piece> sent, received;
  for (int64_t r = 0; r < ranks_; ++r) {
    const auto add = [&](const std::vector<Piece>& of_ranks, std::vector<Comm::Piece>& list) {
      const Tensor& whole = at(of_ranks, r).whole;
      if (!whole.empty() && whole.numel() > 0) list.push_back({static_cast<int>(r), whole});
    };
    add(pieces.to, sent);
    add(pieces.from, received);
  }
  if (meter_ != nullptr) meter_->moved(what, bytes_of(sent), bytes_of(received));
  if (ctx.planning) return;
  const OpScope op_scope(ctx, "context_exchange");
  event_->record(ctx.stream);
  event_->block(comm_.stream());
  const size_t wait = meter_ == nullptr ? 0 : meter_->wait_begins(what, ctx.stream);
  comm_.exchange(sent, received, most_bytes, what);
  event_->record(comm_.stream());
  event_->block(ctx.stream);
  if (meter_ != nullptr) meter_->wait_ends(wait, ctx.stream);
}

namespace {

// The bytes of the largest piece that a rank sends to another.
int64_t most_bytes(const std::vector<ContextGroup::Rows>& tensors, const RowLists& has, const RowLists& needs) {
  int64_t most = 0;
  for (size_t i = 0; i < has.size(); ++i)
    for (size_t j = 0; j < needs.size(); ++j) {
      int64_t rows = 0;
      for (const Common& range : common_rows(has[i], needs[j])) rows += range.rows;
      if (i != j) most = std::max(most, rows);
    }
  int64_t bytes = 0;
  for (const ContextGroup::Rows& t : tensors) bytes += elements_of(t.from, most) * size_of(t.from.dtype);
  return bytes;
}

}  // namespace

void ContextGroup::gather(Context& ctx, const std::vector<Rows>& tensors, const RowLists& has, const RowLists& needs,
                          const std::string& what) {
  Scratch::Scope scope(ctx.scratch);
  const auto sends = [&](int64_t a, int64_t b) { return common_rows(at(has, a), at(needs, b)); };
  const Pieces pieces = alloc(scope, tensors, sends);
  // Calls move(tensor of the call, range, its number) for all rows that rank a sends to rank b.
  const auto for_each = [&](int64_t a, int64_t b, auto&& move) {
    const std::vector<Common> ranges = sends(a, b);
    for (size_t k = 0; k < ranges.size(); ++k)
      for (size_t i = 0; i < tensors.size(); ++i) move(i, ranges[k], k);
  };
  for (int64_t r = 0; r < ranks_; ++r)
    for_each(rank_, r, [&](size_t i, const Common& range, size_t k) {
      copy_rows(ctx, r == rank_ ? rows_of(tensors[i].to, range.in_needs, range.rows) : at(pieces.to, r).views[k][i],
                rows_of(tensors[i].from, range.in_has, range.rows));
    });
  exchange(ctx, pieces, most_bytes(tensors, has, needs), what);
  for (int64_t r = 0; r < ranks_; ++r)
    if (r != rank_)
      for_each(r, rank_, [&](size_t i, const Common& range, size_t k) {
        copy_rows(ctx, rows_of(tensors[i].to, range.in_needs, range.rows), at(pieces.from, r).views[k][i]);
      });
}

void ContextGroup::reduce(Context& ctx, const std::vector<Rows>& tensors, const RowLists& has, const RowLists& needs,
                          const std::string& what) {
  Scratch::Scope scope(ctx.scratch);
  const auto sends = [&](int64_t a, int64_t b) { return common_rows(at(has, b), at(needs, a)); };
  const Pieces pieces = alloc(scope, tensors, sends);
  for (int64_t r = 0; r < ranks_; ++r) {
    const std::vector<Common> ranges = sends(rank_, r);
    for (size_t k = 0; k < ranges.size() && r != rank_; ++k)
      for (size_t i = 0; i < tensors.size(); ++i)
        copy_rows(ctx, at(pieces.to, r).views[k][i], rows_of(tensors[i].from, ranges[k].in_needs, ranges[k].rows));
  }
  exchange(ctx, pieces, most_bytes(tensors, has, needs), what);
  for (const Rows& t : tensors) zero(ctx, t.to);
  for (int64_t r = 0; r < ranks_; ++r) {
    const std::vector<Common> ranges = sends(r, rank_);
    for (size_t k = 0; k < ranges.size(); ++k)
      for (size_t i = 0; i < tensors.size(); ++i)
        add_rows(ctx, rows_of(tensors[i].to, ranges[k].in_has, ranges[k].rows),
                 r == rank_ ? rows_of(tensors[i].from, ranges[k].in_needs, ranges[k].rows)
                            : ConstTensor(at(pieces.from, r).views[k][i]));
  }
}

}  // namespace triad
