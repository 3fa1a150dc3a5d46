#include "train/step/step_results.h"

#include <algorithm>
#include <utility>

#include "engine/check.h"

namespace triad {

StepResults::Region StepResults::add(ConstTensor from) {
  return {from, std::exchange(bytes_, bytes_ + (from.empty() ? 0 : from.bytes()))};
}

StepResults::StepResults(Device device, const Tensors& tensors, int64_t ranks, bool sharded)
    : device_(device),
      several_ranks_(ranks > 1),
      sharded_(sharded),
      numbers_(add(tensors.numbers)),
      asserts_(add(tensors.asserts)),
      norms_(add(tensors.norms)),
      stats_(add(tensors.stats)) {
  for (size_t i = 0; i < kMaxQueued; ++i) slots_.emplace_back(device, bytes_).index = i;
}

void StepResults::push(Context& ctx, const Step& step) {
  Slot& slot = open();
  slot.step = step;
  const auto fetch = [&](const Region& r) {
    if (!r.from.empty())
      backend::copy(slot.memory.data() + r.offset, Device::cpu(), r.from.data, r.from.device, r.from.bytes(),
                    ctx.stream.handle());
  };
  fetch(numbers_);
  fetch(asserts_);
  if (step.measured) fetch(norms_);
  fetch(stats_);
  slot.done.record(ctx.stream);
  queued_.push_back(slot.index);
  next_ = (next_ + 1) % kMaxQueued;
}

const StepResults::Slot& StepResults::pop() {
  TRIAD_CHECK(!queued_.empty(), "the result of a step was asked for, and none is queued");
  Slot& slot = slots_[queued_.front()];
  queued_.pop_front();
  slot.done.synchronize();
  return slot;
}

StepResults::Times StepResults::times(const Slot& slot) const {
  const bool on_gpu = device_.is_cuda();
  Times times;
  times.compute = slot.computed.ms_since(slot.began) - (on_gpu ? 0 : slot.inside_ms);
  times.update = slot.done.ms_since(several_ranks_ ? slot.summed : slot.computed);
  if (several_ranks_) times.comm = slot.host_ms + (on_gpu ? slot.summed.ms_since(slot.computed) : 0);
  if (sharded_ && on_gpu) {
    slot.gathered.synchronize();
    times.gather = std::max(0.0, slot.gathered.ms_since(slot.done));
  }
  return times;
}

}  // namespace triad
