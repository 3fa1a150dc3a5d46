// Progress: where a rank's work is, below the step, for a thread beside it that tells slow from hung
// (train/monitor/watchdog.h). The host's place is the op that queues work now (OpScope) and the stage of the step. A
// GPU's own place is a word in pinned memory, which the stream writes as it gets to each layer: no synchronisation, and
// in a recorded graph it is written at every replay.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "engine/context.h"
#include "engine/op_scope.h"

namespace triad {

// An evaluation lasts until something else is told than the forward and the head of its batches.
enum class Stage : uint8_t { start, data, forward, head, backward, embedding, update, result, evaluation, checkpoint };

// A listener that is also told which part of a step, and which layer, the ops that follow belong to.
class StageListener : public OpListener {
 public:
  virtual void stage(Context&, Stage, int64_t layer) = 0;
};

// layer: -1 outside of the layers.
inline void tell_stage(Context& ctx, Stage stage, int64_t layer = -1) {
  if (ctx.listeners == nullptr) return;
  for (OpListener* each : *ctx.listeners)
    if (auto* listener = dynamic_cast<StageListener*>(each)) listener->stage(ctx, stage, layer);
}

class Progress final : public StageListener {
 public:
  explicit Progress(Device device) : mark_(device, sizeof(uint32_t)) { device_mark() = 0; }

  void begin(const char* op) override;
  void end() override;
  void stage(Context&, Stage, int64_t layer) override;
  void step_done() { steps_.fetch_add(1, std::memory_order_relaxed), advance(); }

  // From any thread. Host and device have moved if and only if one of these numbers has changed (a device that is seen
  // at the same layer of another step, between two looks, counts as still: looks are many).
  struct Place {
    uint64_t count = 0;        // ops begun and ended, stages, steps
    uint32_t device_mark = 0;  // GPU alone; 0: nothing reached yet
    int64_t steps = 0;         // done
    const char* op = nullptr;  // the last one begun; nullptr: none yet
    bool in_op = false;
    Stage stage = Stage::start;
    int64_t layer = -1;
    std::string stage_text() const;   // "backward of layer 3"
    std::string device_text() const;  // the same of what the device has reached; "" without a GPU
  };
  Place place() const;

 private:
  volatile uint32_t& device_mark() const { return *reinterpret_cast<volatile uint32_t*>(mark_.data()); }
  void advance() { count_.fetch_add(1, std::memory_order_relaxed); }

  PinnedMemory mark_;
  std::atomic<uint64_t> count_ = 0;
  std::atomic<int64_t> steps_ = 0;
  std::atomic<const char*> op_ = nullptr;
  std::atomic<bool> in_op_ = false;
  std::atomic<uint32_t> stage_ = 0;  // as device_mark
};

namespace backend {
// The stream writes value to pinned memory when it gets there, without holding up what follows.
void write_mark(Device, void* stream, std::byte* pinned, uint32_t value);
}  // namespace backend

}  // namespace triad
