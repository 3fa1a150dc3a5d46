#include "train/weight_gather.h"

#include "engine/check.h"

namespace triad {

WeightGather::WeightGather(Context& ctx, const Params& params, GradReducer& reducer)
    : params_(params), reducer_(reducer), waited_(reducer.buckets().size(), true) {
  for (size_t b = 0; b < waited_.size(); ++b) arrived_.emplace_back(ctx.planning ? Device::cpu() : ctx.device);
}

void WeightGather::start(const GradBucket& bucket) {
  const ElementRange e = bucket.elements;
  const Stream& on = reducer_.gather(bucket, params_.weights().slice(0, e.begin, e.end), "weights");
  arrived_[static_cast<size_t>(reducer_.index_of(bucket))].record(on);
}

void WeightGather::need(ConstTensor weight, const Stream& on) {
  const ConstTensor all = params_.weights();
  const int64_t begin = (weight.data - all.data) / size_of(all.dtype), end = begin + weight.numel();
  TRIAD_CHECK(begin >= 0 && end <= all.numel(), "{} is needed, which is no weight", weight.str());
  for (size_t b = 0; b < waited_.size(); ++b) {
    const ElementRange e = reducer_.buckets()[b].elements;
    if (waited_[b] || e.begin >= end || e.end <= begin) continue;
    arrived_[b].block(on);
    waited_[b] = true;
  }
}

}  // namespace triad
