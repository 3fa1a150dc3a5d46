// ContextGroup: the ranks that share each sequence (dist.context), and what they exchange. Every rank of the run calls
// the same functions in the same order, with the lists of the same layout.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/context.h"
#include "model/context_layout.h"

namespace triad {

class ExchangeMeter;

class ContextGroup {
 public:
  // group: the ranks that share the sequences (Comm::group). layout: of this rank.
  ContextGroup(const Context&, Comm& group, const ContextLayout& layout);

  // A tensor [B, rows, ..] that receives rows, and one that has them. All of a call have one dtype and one B.
  struct Rows {
    Tensor to;
    ConstTensor from;
  };
  // Copies rows between the ranks: `from` holds this rank's rows of `has`, and `to` its rows of `needs`, overwritten.
  // No two ranges of `has` overlap, and they cover those of `needs`. what: names the data in messages.
  void gather(Context&, const std::vector<Rows>&, const RowLists& has, const RowLists& needs, const std::string& what);
  // The reverse, for gradients: `from` holds this rank's addends of its rows of `needs`, and `to` [has], overwritten,
  // the sums over the ranks, added in the order of ranks. f32, or f64.
  void reduce(Context&, const std::vector<Rows>&, const RowLists& has, const RowLists& needs, const std::string& what);

  // Measures the exchanges from now on (exchange_meter.h); null: none.
  void measure(ExchangeMeter* meter) { meter_ = meter; }

 private:
  // One contiguous tensor for rows that two ranks exchange, and its views: of each range of them, one for each tensor
  // of the call, [B, rows, ..].
  struct Piece {
    Tensor whole;
    std::vector<std::vector<Tensor>> views;
  };
  // What this rank sends to and receives from each rank of the group; without rows for itself.
  struct Pieces {
    std::vector<Piece> to, from;
  };
  // Pieces for the rows that ranks send. sends(a, b): the numbers of rows of each range that rank a sends to rank b.
  template <class Sends>
  Pieces alloc(Scratch::Scope&, const std::vector<Rows>&, Sends&& sends) const;
  // most_bytes: those of the largest piece of any rank.
  void exchange(Context&, const Pieces&, int64_t most_bytes, const std::string& what);

  Comm& comm_;
  int64_t ranks_, rank_;        // of the group
  std::optional<Event> event_;  // absent while memory is planned
  ExchangeMeter* meter_ = nullptr;
};

}  // namespace triad
