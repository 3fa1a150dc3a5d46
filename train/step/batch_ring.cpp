#include "train/step/batch_ring.h"

#include <cstring>
#include <vector>

#include "engine/check.h"
#include "kernels/nsa/document_bounds.h"

namespace triad {

namespace {

constexpr size_t kSlots = 4;  // micro-batches whose copies to the device may be queued

int64_t bytes_or_none(const Tensor& t) { return t.empty() ? 0 : t.bytes(); }

}  // namespace

BatchRing::BatchRing(Device device, int64_t bytes) {
  for (size_t i = 0; i < kSlots; ++i) slots_.emplace_back(device, bytes);
}

int64_t BatchRing::bytes(const Activations& act, const ScaleTensors& scales) {
  return act.tokens.bytes() + act.targets.bytes() + bytes_or_none(act.bounds) + bytes_or_none(act.padding_begin) +
         scales.loss.bytes() + bytes_or_none(scales.index);
}

void BatchRing::upload(Context& ctx, const Activations& act, const ScaleTensors& scale_tensors, const HostBatch& batch,
                       int64_t seq_len, const StepScales& scales) {
  const int64_t capacity = act.bounds.empty() ? 0 : act.bounds.size(0), B = act.B();
  if (capacity > 0) check_bounds(batch.bounds, B, seq_len, (capacity - 1) / B);
  Slot& slot = slots_[next_];
  next_ = (next_ + 1) % slots_.size();
  slot.copied.synchronize();  // the slot was used kSlots micro-steps ago, so this seldom waits
  std::byte* at = slot.memory.data();
  const auto put = [&](Tensor to, const void* from) {
    std::memcpy(at, from, static_cast<size_t>(to.bytes()));
    backend::copy(to.data, to.device, at, Device::cpu(), to.bytes(), ctx.stream.handle());
    at += to.bytes();
  };
  const auto put_tokens = [&](Tensor to, std::span<const int32_t> from, int32_t fill) {
    TRIAD_CHECK(static_cast<int64_t>(from.size()) == B * seq_len, "a batch of {} tokens for {}", from.size(), to.str());
    if (act.layout().shared()) return put(to, act.layout().cut(from, B, fill).data());
    put(to, from.data());
  };
  put(scale_tensors.loss, &scales.loss);
  if (!scale_tensors.index.empty()) put(scale_tensors.index, &scales.index);
  put_tokens(act.tokens, batch.tokens, 0);
  put_tokens(act.targets, batch.targets, -1);
  if (!act.padding_begin.empty()) {
    const std::vector<int32_t> none(static_cast<size_t>(B), static_cast<int32_t>(seq_len));
    TRIAD_CHECK(batch.padding_begin.empty() || batch.padding_begin.size() == none.size(),
                "{} first padded tokens for {} sequences", batch.padding_begin.size(), B);
    put(act.padding_begin, batch.padding_begin.empty() ? none.data() : batch.padding_begin.data());
  }
  if (capacity > 0) {
    std::vector<int32_t> padded = act.layout().extend(batch.bounds, B);
    padded.resize(static_cast<size_t>(capacity), padded.back());
    put(act.bounds, padded.data());
  }
  slot.copied.record(ctx.stream);
}

}  // namespace triad
