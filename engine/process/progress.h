// Progress: a rank's position below the step, for a concurrent thread that distinguishes slow from hung ranks
// (train/monitor/watchdog.h). The host's position is the op that queues work now (OpScope) and the stage of the step.
// The GPU's is a word in pinned memory that the stream writes when it reaches each layer, without synchronisation; a
// graph writes it at every replay.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "engine/context.h"
#include "engine/op_scope.h"

namespace triad {

// An evaluation lasts until a stage other than its batches' forward and head is reported.
enum class Stage : uint8_t { start, data, forward, head, backward, embedding, update, result, evaluation, checkpoint };

// A listener that also receives the stage of the step, and the layer, to which the following ops belong.
class StageListener : public OpListener {
 public:
  virtual void stage(Context&, Stage, int64_t layer) = 0;
};

// layer: -1 outside the layers.
inline void report_stage(Context& ctx, Stage stage, int64_t layer = -1) {
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

  // Callable from any thread. Host and device have moved if one of count, device_mark and steps has changed. (A device
  // seen at the same layer of two different steps counts as unmoved; the next sample corrects that.)
  struct Position {
    uint64_t count = 0;        // ops begun and ended, stages and steps
    uint32_t device_mark = 0;  // last stage and layer that the GPU reached; 0: none, or the CPU
    int64_t steps = 0;         // finished steps
    const char* op = nullptr;  // last op begun; nullptr: none yet
    bool in_op = false;
    Stage stage = Stage::start;
    int64_t layer = -1;
    std::string stage_text() const;   // "backward of layer 3"
    std::string device_text() const;  // the same for device_mark; "" without a GPU
  };
  Position position() const;

 private:
  volatile uint32_t& device_mark() const { return *reinterpret_cast<volatile uint32_t*>(mark_.data()); }
  void advance() { count_.fetch_add(1, std::memory_order_relaxed); }

  PinnedMemory mark_;
  std::atomic<uint64_t> count_ = 0;
  std::atomic<int64_t> steps_ = 0;
  std::atomic<const char*> op_ = nullptr;
  std::atomic<bool> in_op_ = false;
  std::atomic<uint32_t> stage_ = 0;  // encoded as device_mark
};

namespace backend {
// Makes the stream write `value` to pinned memory when it reaches this point; later work does not wait for the write.
void write_mark(Device, void* stream, std::byte* pinned, uint32_t value);
}  // namespace backend

}  // namespace triad
