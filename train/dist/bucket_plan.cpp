#include "train/dist/bucket_plan.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/units.h"
#include "kernels/step/reduce.h"
#include "model/flops.h"
#include "train/config/schedule.h"
#include "train/fit/step_cost.h"

namespace triad {

namespace {
constexpr int64_t kElementAlign = 128;
}  // namespace

int64_t segment_unit(int64_t world) {
  // Boundaries are multiples of kSumPiece: a rank then holds whole pieces of the sum of squares, so the gradient norm
  // has the same bits for every dist.zero.
  return world > 1 ? kSumPiece * world : kElementAlign;
}

bool has_grad_windows(const Config& c, int64_t world) {
  return (c.dist.zero >= 2 && is_sharded(c, world)) || c.train.grads_dtype == Precision::bf16;
}
bool has_weight_windows(const Config& c, int64_t world) { return c.dist.zero == 3 && is_sharded(c, world); }

CommCtas comm_ctas_during_backward(const Config& config, int64_t world) {
  // A graph that holds exchanges of dist.context ends before the gradients are summed (SequenceGroup::launch), so no
  // kernel of backward needs the SMs while they are.
  if (config.dist.context > 1 && config.runtime.cuda_graph && !has_grad_windows(config, world)) return CommCtas::all;
  const TrainConfig t = in_stage(config, stages_of(config.train).back()).train;
  const double backward_s = 2.0 / 3 * training_flops(config.model, t.micro_batch_size, t.seq_len) /
                            static_cast<double>(config.dist.context) / kH200Rates.flops;
  const double element = config.dist.grad_dtype == Precision::bf16 ? sizeof(bf16) : sizeof(float);
  const double bytes = element * static_cast<double>(count_parameters(config.model)) * 2 * (world - 1) / world;
  return bytes / kH200Rates.few_ctas < backward_s / 2 ? CommCtas::few : CommCtas::all;
}

std::vector<GradBucket> plan_buckets(const Params& params, int64_t elements, int64_t unit, bool by_segment,
                                     int64_t late_times) {
  const int64_t most = std::max(unit, elements / unit * unit), all = params.stored_elements();
  TRIAD_CHECK(all % unit == 0, "{} stored elements in units of {}", all, unit);
  const Segments& segments = params.segments();
  const ElementRange embed = segments[segments.embed()], rest = segments[segments.rest()];
  std::vector<GradBucket> buckets;
  // Cuts [begin, end) into buckets, starting at the end, where backward begins.
  const auto cut = [&](int64_t begin, int64_t end, bool late) {
    const int64_t size = late ? late_times * most : most;
    for (; end > begin; end -= std::min(size, end - begin)) {
      GradBucket bucket{.elements = {std::max(begin, end - size), end}, .params = {}, .late = late};
      for (int64_t i = 0; i < params.count(); ++i) {
        if (range_of(params, i).overlaps(bucket.elements)) bucket.params.push_back(i);
      }
      // The index's padding to whole pieces may be longer than a bucket.
      if (!bucket.params.empty()) buckets.push_back(bucket);
    }
  };
  const auto cut_segments = [&](int64_t begin, int64_t end, bool late) {
    if (!by_segment) return cut(begin, end, late);
    std::vector<ElementRange> within;
    for (int64_t i = 0; i < segments.count(); ++i)
      if (segments[i].size() > 0 && ElementRange{begin, end}.contains(segments[i])) within.push_back(segments[i]);
    std::sort(within.begin(), within.end(), [](const auto& a, const auto& b) { return a.begin > b.begin; });
    for (const ElementRange& segment : within) cut(segment.begin, segment.end, late);
  };
  const bool tied = segments.head() == segments.embed();  // the embedding then precedes the layers
  if (tied)
    cut_segments(embed.end, rest.begin, /*late=*/false);
  else
    cut_segments(0, embed.begin, /*late=*/false);
  // The newest bucket holds the first layer, whose gradients backward finishes last.
  if (!buckets.empty()) buckets.back().late = true;
  cut(rest.begin, rest.end, /*late=*/true);
  cut(embed.begin, embed.end, /*late=*/true);
  return buckets;
}

BucketPlan::BucketPlan(const Params& params, const Config& config, int64_t rank, int64_t world)
    : rank_(rank % ranks_of_replica(config, world)),
      world_(ranks_of_replica(config, world)),
      buckets_(plan_buckets(
          params, static_cast<int64_t>(config.dist.bucket_mb * kMiB) / size_of(params.grad_buffer().memory().dtype),
          segment_unit(world), has_grad_windows(config, world),
          // A bucket passes between the replicas while the next one is summed within them, late ones too.
          sums_in_two_hops(config, world) ? 1 : kLateTimes)),
      buckets_of_(static_cast<size_t>(params.count())) {
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (const int64_t i : buckets_[b].params) buckets_of_[static_cast<size_t>(i)].push_back(static_cast<int64_t>(b));
}

int64_t BucketPlan::largest() const {
  int64_t elements = 0;
  for (const GradBucket& bucket : buckets_) elements = std::max(elements, bucket.elements.size());
  return elements;
}

Parts BucketPlan::shards() const {
  Parts parts;
  for (const GradBucket& bucket : buckets_) parts.add(shard(bucket));
  return parts;
}

ElementRange BucketPlan::shard(const GradBucket& bucket) const {
  const int64_t size = bucket.elements.size() / world_, begin = bucket.elements.begin + rank_ * size;
  return {begin, begin + size};
}

}  // namespace triad
