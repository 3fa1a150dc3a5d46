// BackwardTrace: what a backward does, op by op and layer by layer in the order in which it is queued, and when the
// device did it. Two timed events an op; the host waits for nothing, and reads the times when the step's results are
// there.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "engine/op_scope.h"

namespace triad {

class BackwardTrace final : public OpListener {
 public:
  // Listens to ctx from start() to stop(). slot: of kSlots, which may be in use at the
  // same time by steps that the device has yet to do.
  static constexpr size_t kSlots = 2;
  explicit BackwardTrace(Context& ctx) : ctx_(ctx), slots_(kSlots) {}
  void start(size_t slot);
  void stop();

  struct Op {
    int64_t layer;  // -1 outside of them
    std::string name, stream;
    double begin_ms, ms;  // from the start of the trace; taken
  };
  // Of a slot that the device is done with; empty where nothing was traced since it was last asked.
  std::vector<Op> take(size_t slot);

  void begin(const char*) override {}
  void end() override {}
  void begin_on(const char* op, const Stream& on) override;
  void end_on(const Stream& on) override;

 private:
  struct Entry {
    Entry(Device device) : begin(device, true), end(device, true) {}
    const char* op = "";
    int64_t layer = -1;
    const Stream* stream = nullptr;
    Event begin, end;
  };
  struct Slot {
    std::deque<Entry> entries;  // made once, used again
    size_t used = 0;
  };
  Context& ctx_;
  std::vector<Slot> slots_;
  Slot* now_ = nullptr;
};

// traces.log: a heading, a line an op, and for each layer how long it took in all.
std::string trace_text(int64_t step, const std::vector<BackwardTrace::Op>&);
// What of such a file is of steps up to `step`.
std::string traces_until(int64_t step, std::string_view file);

}  // namespace triad
