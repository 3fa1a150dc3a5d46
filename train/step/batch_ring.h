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
// documents (nsa/document_tables.h), empty if every row is one document. padding_begin: each sequence's first padded
// token, for a taught index; empty: no padding.
struct HostBatch {
  std::span<const int32_t> tokens, targets, bounds, padding_begin = {};
};

// The gradients with respect to the loss sums (LossScales): numbers, and the tensors [1] f64 that hold them on the
// device. index: only with a taught index.
struct StepScales {
  double loss = 0, index = 0;
};
struct ScaleTensors {
  Tensor loss, index;
};

class BatchRing {
 public:
  // bytes: the most that one batch copies.
  BatchRing(Device, int64_t bytes);
  // Bytes that a batch of these activations copies.
  static int64_t bytes(const Activations&, const ScaleTensors&);

  // Queues the copies of a batch of sequences of seq_len tokens: this rank's tokens, targets, bounds and padding to
  // `to`, and the scales to scale_tensors. Throws Error if the sizes differ from those of `to`.
  void upload(Context&, const Activations& to, const ScaleTensors& scale_tensors, const HostBatch&, int64_t seq_len,
              const StepScales& scales);

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
