// StepResults: the numbers of queued steps on their way to the host. Each step has a slot of pinned memory, into which
// the device copies its numbers, and events that mark its parts: the host reads them when they have arrived, while the
// device computes the next step.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>

#include "engine/context.h"

namespace triad {

class StepResults {
 public:
  static constexpr size_t kMaxQueued = 2;

  // Times of a step in ms.
  struct Times {
    double compute = 0;  // micro-steps on the device
    double update = 0;   // norm, step guard and optimizer on the device
    double comm = 0;     // wait for other ranks after this rank's own work
    double gather = 0;   // time after the update until the weights gathered then have arrived
  };
  // The device tensors whose values a result holds; empty ones are left out.
  struct Tensors {
    ConstTensor numbers, asserts, norms, stats;
  };
  // ranks: ranks of the run. sharded: each rank updates only a part of the parameters.
  StepResults(Device, const Tensors&, int64_t ranks, bool sharded);

  // What the reader of a step's values has to know about it.
  struct Step {
    int64_t number = 0, positions = 0, index_rows = 0;
    bool measured = false, dense = false;
  };
  struct Slot {
    Slot(Device device, int64_t bytes)
        : memory(device, bytes),
          began(device, true),
          computed(device, true),
          summed(device, true),
          gathered(device, true),
          done(device, true) {}
    PinnedMemory memory;
    Event began, computed, summed;  // the step began; this rank's gradients are done; those of all ranks are summed
    Event gathered;                 // weights of all ranks have arrived; on the comm stream, with shards
    Event done;                     // all values are in `memory`
    double host_ms = 0;             // time that the host waited for other ranks in this step, ms
    double inside_ms = 0;           // its part before `computed`, ms: on the CPU, the host thread computes
    size_t index = 0;
    Step step;
  };
  bool full() const { return queued_.size() == kMaxQueued; }
  Slot& open() { return slots_[next_]; }  // the slot of the step that is being queued
  // Queues the copies of the values into the open slot (of the norms if measured) and closes it.
  void push(Context&, const Step&);
  // Waits for the values of the oldest closed slot; they stay until push() has been called kMaxQueued times.
  const Slot& pop();

  // Where a slot has the values of each tensor.
  const std::byte* numbers(const Slot& s) const { return s.memory.data() + numbers_.offset; }
  const std::byte* asserts(const Slot& s) const { return s.memory.data() + asserts_.offset; }
  const std::byte* norms(const Slot& s) const { return s.memory.data() + norms_.offset; }
  const std::byte* stats(const Slot& s) const { return s.memory.data() + stats_.offset; }
  // On the CPU, compute includes the host's waits for other ranks, which are subtracted.
  Times times(const Slot&) const;

 private:
  struct Region {
    ConstTensor from;
    int64_t offset = 0;
  };
  Region add(ConstTensor from);

  Device device_;
  bool several_ranks_, sharded_;
  int64_t bytes_ = 0;
  Region numbers_, asserts_, norms_, stats_;
  std::deque<Slot> slots_;
  size_t next_ = 0;
  std::deque<size_t> queued_;
};

}  // namespace triad
