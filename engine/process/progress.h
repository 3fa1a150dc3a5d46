// Progress: how far this rank is within a step, so that a concurrent thread (train/monitor/watchdog.h) can distinguish
// a slow rank from a hung one. The host's position is the op that queues work now (OpScope) and the step's stage. The
// GPU's position is a word in pinned memory: the stream writes it when it reaches each layer, without synchronisation,
// and a graph writes it at every replay.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "engine/context.h"
#include "engine/op_scope.h"

namespace triad {

// Parts of a run. In an evaluation, batches report the stages forward and head, which then count as evaluation; any
// other stage ends the evaluation.
enum class Stage : uint8_t { start, data, forward, head, backward, embedding, update, result, evaluation, checkpoint };

// A listener that is also called with the step's stage, and the layer, that the following ops belong to.
class StageListener : public OpListener {
 public:
  virtual void stage(Context&, Stage, int64_t layer) = 0;
};

// Calls ctx's stage listeners. layer: -1 outside the layers.
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

  // May be called by any thread. Host or device has moved since the last call if one of count, device_mark and steps
  // has changed. (A device at the same layer in two different steps counts as unmoved; the next call corrects that.)
  struct Position {
    uint64_t count = 0;        // ops begun, ops ended, stages and steps so far
    uint32_t device_mark = 0;  // last stage and layer that the GPU reached; 0: none yet, or the CPU
    int64_t steps = 0;         // finished steps
    const char* op = nullptr;  // last op begun; nullptr: none yet
    bool in_op = false;
    Stage stage = Stage::start;
    int64_t layer = -1;
    std::string stage_text() const;   // "backward of layer 3"
    std::string device_text() const;  // stage and layer of device_mark, in the same form; "" without a GPU
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
  std::atomic<uint32_t> stage_ = 0;  // stage and layer, encoded as device_mark is
};

namespace backend {
// Makes the stream write `value` to pinned memory when it reaches this point. Work queued later does not wait for the
// write.
void write_mark(Device, void* stream, std::byte* pinned, uint32_t value);
}  // namespace backend

}  // namespace triad
