// BatchRing: pinned buffers from which batches are copied to the device, so that the host can prepare the next
// micro-step while earlier copies are queued.
#pragma once
#include <cstdint>
#include <deque>
#include <span>

#include "engine/context.h"
#include "model/activations.h"

namespace triad {

// A micro-step's sequences: tokens and targets [B*T], whole sequences also if ranks share them. bounds: those of the
// documents (nsa/document_tables.h), empty if every row is one document.
struct HostBatch {
  std::span<const int32_t> tokens, targets, bounds;
};

class BatchRing {
 public:
  // bytes: the most that one batch copies.
  BatchRing(Device, int64_t bytes);
  // Bytes that a batch of these activations copies.
  static int64_t bytes(const Activations&, const Tensor& loss_scale);

  // Queues the copies of a batch of sequences of seq_len tokens: this rank's tokens, targets and bounds to `to`, and
  // 1 / step_positions (0 without positions) to loss_scale [1] f64. Throws Error if the sizes differ from those of
  // `to`.
  void upload(Context&, const Activations& to, const Tensor& loss_scale, const HostBatch&, int64_t seq_len,
              int64_t step_positions);

 private:
  struct Slot {
    Slot(Device device, int64_t bytes) : memory(device, bytes), copied(device, /*timed=*/false) {}
    PinnedMemory memory;
    Event copied;
  };
  std::deque<Slot> slots_;
  size_t next_ = 0;
};

}  // namespace triad
