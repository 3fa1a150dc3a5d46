#include "model/sequence/group.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/step/rows.h"
#include "model/sequence/exchange_meter.h"

namespace triad {

namespace {

// Rank r's element in a list with one element per rank in the group.
template <class List>
auto& at(List& list, int64_t r) {
  return list[static_cast<size_t>(r)];
}

// Consecutive rows that two lists have in common: where they begin in each list's tensor.
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

// The ranges in their order, divided so that no two in a part share a row in `has`. Ranges in `needs` may overlap.
std::vector<std::vector<Common>> apart(const std::vector<Common>& ranges) {
  std::vector<std::vector<Common>> parts;
  for (const Common& r : ranges) {
    const bool meets = parts.empty() || std::any_of(parts.back().begin(), parts.back().end(), [&](const Common& o) {
                         return r.in_has < o.in_has + o.rows && o.in_has < r.in_has + r.rows;
                       });
    if (meets) parts.emplace_back();
    parts.back().push_back(r);
  }
  return parts;
}

template <class TensorType>
TensorType rows_of(const TensorType& t, int64_t begin, int64_t rows) {
  return t.slice(1, begin, begin + rows);
}

// Whether a tensor's rows are sent from it, or received in it, without a copy. It is so on all ranks or on none.
bool is_direct(const ConstTensor& t) { return t.size(0) == 1 && t.contiguous(); }

// Elements in `rows` rows of a tensor, over all sequences.
int64_t elements_of(const ConstTensor& t, int64_t rows) {
  Shape shape = t.shape();
  shape.dim[1] = rows;
  return shape.numel();
}

// Contiguous memory for rows that are sent or received through copies. Every rank allocates as much as the one that
// needs most, so one rank's memory plan holds for all.
class Staging {
 public:
  // sends(a, b): the ranges that rank a sends to rank b. in_place: whether rows may be received in `to`.
  template <class Sends>
  Staging(Scratch::Scope& scope, const std::vector<SequenceGroup::Rows>& tensors, int64_t ranks, const Sends& sends,
          bool in_place) {
    int64_t most = 0;
    for (int64_t me = 0; me < ranks; ++me) {
      int64_t elements = 0;
      for (int64_t r = 0; r < ranks; ++r)
        for (const SequenceGroup::Rows& t : tensors) {
          if (r == me) continue;
          const auto add = [&](const std::vector<Common>& ranges) {
            for (const Common& range : ranges) elements += align_up(elements_of(t.from, range.rows));
          };
          if (!is_direct(t.from)) add(sends(me, r));
          if (!in_place || !is_direct(t.to)) add(sends(r, me));
        }
      most = std::max(most, elements);
    }
    if (most > 0) all_ = scope.alloc(tensors.at(0).from.dtype, {most}, "rows of other ranks");
  }
  Tensor take(const Shape& shape) {
    const int64_t begin = next_;
    next_ += align_up(shape.numel());
    return all_.slice(0, begin, begin + shape.numel()).view(shape);
  }

 private:
  Tensor all_;
  int64_t next_ = 0;
};

// The bytes of the rows that a rank sends to another one, at most.
int64_t most_bytes(const std::vector<SequenceGroup::Rows>& tensors, const RowLists& has, const RowLists& needs) {
  int64_t most = 0;
  for (size_t i = 0; i < has.size(); ++i)
    for (size_t j = 0; j < needs.size(); ++j) {
      int64_t rows = 0;
      for (const Common& range : common_rows(has[i], needs[j])) rows += range.rows;
      if (i != j) most = std::max(most, rows);
    }
  int64_t bytes = 0;
  for (const SequenceGroup::Rows& t : tensors) bytes += elements_of(t.from, most) * size_of(t.from.dtype);
  return bytes;
}

template <class Pieces>
int64_t bytes_of(const Pieces& pieces) {
  int64_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.data.bytes();
  return bytes;
}

}  // namespace

SequenceGroup::SequenceGroup(const Context& ctx, Comm& group, const SequenceLayout& layout)
    : comm_(group), ranks_(layout.ranks), rank_(layout.rank) {
  TRIAD_CHECK(group.world() == ranks_, "{} ranks share sequences, and their group has {}", ranks_, group.world());
  if (ctx.planning) return;
  ready_.emplace(ctx.device);
  constexpr size_t kOpen = 8;  // more than a layer's transfers that are open at a time
  for (size_t i = 0; i < kOpen; ++i) done_.emplace_back(ctx.device);
}

void SequenceGroup::Transfer::finish(Context& ctx) const {
  if (done_ != nullptr) {
    const ExchangeMeter::Wait wait(meter_, kind_, ctx.stream);
    done_->block(ctx.stream);
  }
  for (const Tensor& t : cleared_) zero(ctx, t);
  copy_rows(ctx, copied_);
  for (const std::vector<RowPair>& rank_rows : added_) add_rows(ctx, rank_rows);
}

void SequenceGroup::exchange(Context& ctx, Transfer& transfer, const Pieces& pieces, int64_t most_bytes,
                             const std::string& what) {
  if (most_bytes == 0) return;
  transfer.meter_ = meter_;
  if (meter_ != nullptr) transfer.kind_ = meter_->moved(what, bytes_of(pieces.to), bytes_of(pieces.from));
  if (ctx.planning) return;
  const OpScope op_scope(ctx, "context_exchange");
  ready_->record(ctx.stream);
  ready_->block(comm_.stream());
  {  // CPU: the rows arrive here
    const ExchangeMeter::Wait wait(ctx.device.is_cuda() ? nullptr : meter_, transfer.kind_, ctx.stream);
    comm_.exchange(pieces.to, pieces.from, most_bytes, what);
  }
  Event& done = done_[next_done_++ % done_.size()];
  done.record(comm_.stream());
  transfer.done_ = &done;
}

SequenceGroup::Transfer SequenceGroup::gather(Context& ctx, Scratch::Scope& scope, const std::vector<Rows>& tensors,
                                              const RowLists& has, const RowLists& needs, const std::string& what) {
  const auto sends = [&](int64_t a, int64_t b) { return common_rows(at(has, a), at(needs, b)); };
  Staging staging(scope, tensors, ranks_, sends, /*in_place=*/true);
  Pieces pieces;
  Transfer transfer;
  std::vector<RowPair> copies;
  for (int64_t r = 0; r < ranks_; ++r) {
    const int rank = static_cast<int>(r);
    for (const Common& range : sends(rank_, r))
      for (const Rows& t : tensors) {
        const ConstTensor from = rows_of(t.from, range.in_has, range.rows);
        if (r != rank_ && is_direct(t.from)) {
          pieces.to.push_back({rank, from});
          continue;
        }
        copies.push_back({r == rank_ ? rows_of(t.to, range.in_needs, range.rows) : staging.take(from.shape()), from});
        if (r != rank_) pieces.to.push_back({rank, copies.back().y});
      }
    if (r == rank_) continue;
    for (const Common& range : sends(r, rank_))
      for (const Rows& t : tensors) {
        const Tensor to = rows_of(t.to, range.in_needs, range.rows);
        pieces.from.push_back({rank, is_direct(t.to) ? to : staging.take(to.shape())});
        if (!is_direct(t.to)) transfer.copied_.push_back({to, pieces.from.back().data});
      }
  }
  copy_rows(ctx, copies);
  exchange(ctx, transfer, pieces, most_bytes(tensors, has, needs), what);
  return transfer;
}

SequenceGroup::Transfer SequenceGroup::reduce(Context& ctx, Scratch::Scope& scope, const std::vector<Rows>& tensors,
                                              const RowLists& has, const RowLists& needs, const std::string& what) {
  const auto sends = [&](int64_t a, int64_t b) { return common_rows(at(has, b), at(needs, a)); };
  Staging staging(scope, tensors, ranks_, sends, /*in_place=*/false);
  // Whether a rank has an addend for each of this rank's rows; then the first one's are copied.
  const RowList& mine = at(has, rank_);
  const auto covers = [&](const std::vector<Common>& ranges) {
    return std::equal(ranges.begin(), ranges.end(), mine.begin(), mine.end(),
                      [](const Common& range, const RowRange& row) { return range.rows == row.size(); });
  };
  Pieces pieces;
  Transfer transfer;
  std::vector<RowPair> copies;
  const bool copied = covers(sends(0, rank_));
  if (!copied)
    for (const Rows& t : tensors) transfer.cleared_.push_back(t.to);
  for (int64_t r = 0; r < ranks_; ++r) {
    const int rank = static_cast<int>(r);
    if (r != rank_)
      for (const Common& range : sends(rank_, r))
        for (const Rows& t : tensors) {
          const ConstTensor from = rows_of(t.from, range.in_needs, range.rows);
          pieces.to.push_back({rank, from});
          if (is_direct(t.from)) continue;
          copies.push_back({staging.take(from.shape()), from});
          pieces.to.back().data = copies.back().y;
        }
    for (const std::vector<Common>& round : apart(sends(r, rank_))) {
      std::vector<RowPair> addends;
      for (const Common& range : round)
        for (const Rows& t : tensors) {
          const Tensor to = rows_of(t.to, range.in_has, range.rows);
          if (r == rank_) {
            addends.push_back({to, rows_of(t.from, range.in_needs, range.rows)});
          } else {
            pieces.from.push_back({rank, staging.take(to.shape())});
            addends.push_back({to, pieces.from.back().data});
          }
        }
      if (r == 0 && copied)
        transfer.copied_ = addends;
      else
        transfer.added_.push_back(addends);
    }
  }
  copy_rows(ctx, copies);
  exchange(ctx, transfer, pieces, most_bytes(tensors, has, needs), what);
  return transfer;
}

void SequenceGroup::launch(Context& ctx, const std::function<void()>& launch) {
  ready_->record(comm_.stream());
  ready_->block(ctx.stream);
  comm_.launch_recorded("a recorded micro-step", ctx.stream, launch);
  ready_->record(ctx.stream);
  ready_->block(comm_.stream());
}

}  // namespace triad
