// SequenceGroup: the ranks that share each sequence (dist.context), and what they exchange. Every rank of the run calls
// the same functions in the same order, with the lists of the same layout. The ranks' links carry rows while the device
// computes: gather() and reduce() begin a transfer, and its finish() makes the context wait for it.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/context.h"
#include "kernels/step/rows.h"
#include "model/sequence/layout.h"

namespace triad {

class ExchangeMeter;

class SequenceGroup {
 public:
  // group: the ranks that share the sequences (Comm::group). layout: of this rank.
  SequenceGroup(const Context&, Comm& group, const SequenceLayout& layout);

  // A tensor [B, rows, ..] that receives rows, and one that has them. All in a call have one dtype and one B.
  struct Rows {
    Tensor to;
    ConstTensor from;
  };
  // Rows on their way. Until finish(), no `to` may be read, and no `to` or `from` written.
  class [[nodiscard]] Transfer {
   public:
    // Queues on a context: waits until the other ranks' rows have arrived, and puts them into `to`.
    void finish(Context&) const;

   private:
    friend SequenceGroup;
    std::vector<Tensor> cleared_;              // what finish() queues: set to zero,
    std::vector<RowPair> copied_;              // then copied,
    std::vector<std::vector<RowPair>> added_;  // then added, rank after rank
    const Event* done_ = nullptr;              // null while memory is planned, and if nothing is exchanged
    ExchangeMeter* meter_ = nullptr;
    size_t kind_ = 0;  // the exchange's kind, for the meter
  };

  // Copies rows between the ranks: `from` holds this rank's rows in `has`, and `to` its rows in `needs`, overwritten.
  // No two ranges in `has` overlap, and they cover those in `needs`. scope: for memory in use until finish(). what:
  // names the data in messages.
  Transfer gather(Context&, Scratch::Scope&, const std::vector<Rows>&, const RowLists& has, const RowLists& needs,
                  const std::string& what);
  // The reverse, for gradients: `from` holds this rank's addends for its rows in `needs`, and `to` [has], overwritten,
  // the sums over the ranks, added in rank order. f32, or f64.
  Transfer reduce(Context&, Scratch::Scope&, const std::vector<Rows>&, const RowLists& has, const RowLists& needs,
                  const std::string& what);

  // Calls work(), which records this rank's work as a graph, exchanges included, if can_record().
  void record(const std::function<void()>& work) { comm_.record(work); }
  bool can_record() const { return comm_.can_record(); }
  // Queues a recorded graph on ctx.stream by calling launch(). It begins when all the run's earlier collectives have
  // ended, and later ones begin after its end. Two at once could wait forever: a collective's kernel holds SMs until
  // the other ranks' kernels run, and there the other collective may hold them.
  void launch(Context&, const std::function<void()>& launch);

  // Measures the exchanges that begin from now on (exchange_meter.h); null: none.
  void measure(ExchangeMeter* meter) { meter_ = meter; }

 private:
  struct Pieces {
    std::vector<Comm::ConstPiece> to;
    std::vector<Comm::Piece> from;
  };
  void exchange(Context&, Transfer&, const Pieces&, int64_t most_bytes, const std::string& what);

  Comm& comm_;
  int64_t ranks_, rank_;        // group size, rank within the group
  std::optional<Event> ready_;  // one stream's earlier work has ended; absent while memory is planned
  // The links' events, used in turn: a transfer has ended. Transfers end in the order in which they begin, so a wait
  // for an event that was recorded again is only longer.
  std::vector<Event> done_;
  size_t next_done_ = 0;
  ExchangeMeter* meter_ = nullptr;
};

}  // namespace triad
