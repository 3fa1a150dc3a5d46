#include "train/dist/weight_gather.h"

namespace triad {

WeightGather::WeightGather(Context& ctx, const Params& params, GradReducer& reducer)
    : params_(params), reducer_(reducer), waited_(reducer.plan().buckets().size(), true) {
  for (size_t b = 0; b < waited_.size(); ++b) arrived_.emplace_back(ctx.planning ? Device::cpu() : ctx.device);
}

void WeightGather::start(const GradBucket& bucket) {
  const ElementRange e = bucket.elements;
  reducer_.gather(bucket, params_.weights().slice(0, e.begin, e.end), "weights");
  arrived_[static_cast<size_t>(reducer_.plan().index_of(bucket))].record(reducer_.queue().stream());
}

void WeightGather::need(ConstTensor weight, const Stream& on) {
  const ElementRange read = range_in(params_.weights(), weight);
  for (size_t b = 0; b < waited_.size(); ++b) {
    if (waited_[b] || !reducer_.plan().buckets()[b].elements.overlaps(read)) continue;
    arrived_[b].block(on);
    waited_[b] = true;
  }
}

}  // namespace triad
