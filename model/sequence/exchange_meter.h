// ExchangeMeter: counts the bytes that the exchanges of a SequenceGroup move, and measures how long streams wait for
// them. It counts those of a dry step too, so a plan has the bytes of a run. A SequenceGroup without a meter measures
// nothing.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "engine/process/progress.h"
#include "engine/stream.h"
#include "model/sequence/group.h"

namespace triad {

// All exchanges with one kind in forward, or in backward with its recomputation.
struct ExchangeTotals {
  std::string kind;  // such as "keys and values of sel"
  bool backward = false;
  int64_t layers = 0, calls = 0;   // layers with this exchange kind; exchanges
  int64_t sent = 0, received = 0;  // bytes on this rank
  double waited_ms = 0;            // time for which streams waited for these exchanges, if it was measured
};

class ExchangeMeter final : public StageListener {
 public:
  // Measures the exchanges of this group, queued on this context or, while memory is planned, accounted for on it.
  ExchangeMeter(Context&, SequenceGroup&);
  ~ExchangeMeter() override;
  ExchangeMeter(const ExchangeMeter&) = delete;

  // Clears the totals. From now on waits are timed, `times` as many as since the last clear: their events are created
  // here, since work that is timed creates none.
  void time_waits(int64_t times);
  // The totals since the last clear, in the order in which the kinds occurred. Call it when all work has ended.
  std::vector<ExchangeTotals> totals() const;

  // Called by SequenceGroup: an exchange begins. what: its kind, and ", layer " with the layer's index. Returns the
  // number of the kind.
  size_t moved(const std::string& what, int64_t sent, int64_t received);
  // Lives while a stream's wait for such an exchange is queued. meter: null if nothing is measured.
  class Wait {
   public:
    Wait(ExchangeMeter* meter, size_t kind, const Stream&);
    ~Wait();
    Wait(const Wait&) = delete;

   private:
    ExchangeMeter* meter_;
    size_t number_ = 0;
    const Stream& stream_;
  };

  void begin(const char*) override {}
  void end() override {}
  void stage(Context&, Stage stage, int64_t layer) override { backward_ = stage == Stage::backward, layer_ = layer; }

 private:
  struct Kind {
    ExchangeTotals totals;
    std::set<int64_t> layers;
  };
  struct TimedWait {
    explicit TimedWait(Device device) : begin(device, true), end(device, true) {}
    Event begin, end;
    size_t kind = 0;
  };
  size_t kind_of(const std::string& what);

  Context& ctx_;
  SequenceGroup& group_;
  std::vector<Kind> kinds_;
  std::vector<TimedWait> waits_;
  size_t waited_ = 0;  // waits since the last clear; all are timed, or none
  bool backward_ = false;
  int64_t layer_ = -1;
};

}  // namespace triad
