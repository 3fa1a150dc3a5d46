#include "train/dist/weight_gather.h"

#include <algorithm>

#include "kernels/ops/cast.h"

namespace triad {

WeightGather::WeightGather(Context& ctx, const Params& params, GradReducer& reducer, Tensor own)
    : params_(params),
      reducer_(reducer),
      own_(own),
      shards_(reducer.plan().shards()),
      waited_(reducer.plan().buckets().size(), true),
      present_(static_cast<size_t>(params.segments().count()), false),
      buckets_(present_.size()) {
  for (size_t b = 0; b < waited_.size(); ++b) {
    arrived_.emplace_back(ctx.planning ? Device::cpu() : ctx.device);
    for (size_t s = 0; s < buckets_.size(); ++s)
      if (reducer.plan().buckets()[b].elements.overlaps(params.segments()[static_cast<int64_t>(s)]))
        buckets_[s].push_back(static_cast<int64_t>(b));
  }
}

void WeightGather::gather(int64_t bucket) {
  const GradBucket& b = reducer_.plan().buckets()[static_cast<size_t>(bucket)];
  reducer_.queue().wait_for_compute();
  if (!own_.empty()) {
    const Parts::Part& shard = shards_[static_cast<size_t>(bucket)];
    cast(reducer_.queue().ctx(), params_.weights(shard.elements), Parts::of(own_, shard));
  }
  reducer_.gather(b, params_.weights(b.elements), "weights");
  arrived_[static_cast<size_t>(bucket)].record(reducer_.queue().stream());
  waited_[static_cast<size_t>(bucket)] = false;
}

void WeightGather::updated(int64_t bucket) {
  const Segments& segments = params_.segments();
  for (int64_t s = 0; s < segments.count(); ++s) {
    const std::vector<int64_t>& its = buckets_[static_cast<size_t>(s)];
    if (!windowed(s) || std::find(its.begin(), its.end(), bucket) == its.end()) continue;
    present_[static_cast<size_t>(s)] = false;
    // Updates go through the buckets in reverse, so the first one is updated last. What the next forward reads first is
    // gathered while the update goes on.
    const bool read_first = s == segments.embed() || (segments.is_layer(s) && s < 2);
    if (bucket == its.front() && read_first) fetch(s);
    return;
  }
  gather(bucket);
}

void WeightGather::begin(bool forward) {
  forward_ = forward;
  if (forward) waited_.assign(waited_.size(), false);
}

// Fills a segment's memory in the weight ring, after all work on ctx.stream so far, which may read the former weights
// there.
void WeightGather::fetch(int64_t segment) {
  const Segments& segments = params_.segments();
  if (!windowed(segment) || present_[static_cast<size_t>(segment)]) return;
  const ElementRange place = params_.weight_buffer().place(segment, segments);
  for (int64_t i = 0; i < segments.count(); ++i)
    if (params_.weight_buffer().place(i, segments).overlaps(place)) present_[static_cast<size_t>(i)] = false;
  present_[static_cast<size_t>(segment)] = true;
  for (const int64_t bucket : buckets_[static_cast<size_t>(segment)]) gather(bucket);
}

void WeightGather::need(int64_t segment, const Stream& on) {
  fetch(segment);
  for (const int64_t b : buckets_[static_cast<size_t>(segment)]) {
    if (waited_[static_cast<size_t>(b)]) continue;
    arrived_[static_cast<size_t>(b)].block(on);
    waited_[static_cast<size_t>(b)] = true;
  }
  // The next segments that the pass reads, in ring memory that its earlier segments no longer need.
  const Segments& segments = params_.segments();
  if (forward_) {
    const int64_t next = segment == segments.embed() ? 0 : segment + 1;
    if (segment != segments.head() || segment == segments.embed()) {
      if (segments.is_layer(next)) fetch(next);
      if (segment == 0) fetch(segments.head());
    }
  } else {
    const int64_t last = segments.head() - 1, next = segment == segments.head() ? last : segment - 1;
    if (next >= 0 && segments.is_layer(next)) fetch(next);
  }
}

}  // namespace triad
