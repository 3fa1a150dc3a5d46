// BackwardTrace: records a backward's ops in the order in which they are queued, each with layer and device time. Uses
// two timed events per op. The host does not wait: times are read together with the step's results.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "engine/op_scope.h"

namespace triad {

class BackwardTrace final : public OpListener {
 public:
  // Records the ops that run on ctx from start() to stop() into a slot, 0 to kSlots - 1. Every step that is queued on
  // the device at the same time needs its own slot.
  static constexpr size_t kSlots = 2;
  explicit BackwardTrace(Context& ctx) : ctx_(ctx), slots_(kSlots) {}
  void start(size_t slot);
  void stop();

  struct Op {
    int64_t layer;  // the op's layer; -1: outside the layers
    std::string name, stream;
    double begin_ms, ms;  // the op's start since the trace began; its duration
  };
  // Returns the ops recorded in a slot, whose work the device must have finished, and clears the slot. Empty if nothing
  // was traced.
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
    std::deque<Entry> entries;  // one per op; later traces reuse their events
    size_t used = 0;
  };
  Context& ctx_;
  std::vector<Slot> slots_;
  Slot* now_ = nullptr;
};

// The text that traces.log receives: a heading, a line per op, and a line per layer with its total time.
std::string trace_text(int64_t step, const std::vector<BackwardTrace::Op>&);
// The part of traces.log that belongs to steps up to `step`. file: traces.log's content.
std::string traces_until(int64_t step, std::string_view file);

}  // namespace triad
