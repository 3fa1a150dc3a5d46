#include "train/dist/bucket_plan.h"

#include <algorithm>

#include "engine/check.h"
#include "kernels/step/reduce.h"
#include "model/flops.h"

namespace triad {

namespace {
constexpr double kMiB = 1024.0 * 1024.0;
constexpr int64_t kElementAlign = 128;
}  // namespace

int64_t bucket_unit(const DistConfig& c, int64_t world) {
  // With shards, boundaries are multiples of kSumPiece: a rank then holds whole pieces of the sum of squares, so that
  // the gradient norm has the same bits as without shards.
  return c.zero == 1 && world > 1 ? kSumPiece * world : kElementAlign;
}

CommCtas comm_ctas_during_backward(const Config& config, int64_t world) {
  // Rates of H200 GPUs with NVLink: bytes/s of NCCL with few CTAs, FLOP/s of a step. Only their ratio matters.
  constexpr double kFewCtasBytesPerS = 60e9, kFlops = 400e12;
  const TrainConfig& t = config.train;
  const double backward_s = 2.0 / 3 * training_flops(config.model, t.micro_batch_size, t.seq_len) / kFlops;
  const double element = config.dist.grad_dtype == Precision::bf16 ? sizeof(bf16) : sizeof(float);
  const double bytes = element * static_cast<double>(count_parameters(config.model)) * 2 * (world - 1) / world;
  return bytes / kFewCtasBytesPerS < backward_s / 2 ? CommCtas::few : CommCtas::all;
}

std::vector<GradBucket> plan_buckets(const Params& params, int64_t elements, int64_t unit) {
  const int64_t most = std::max(unit, elements / unit * unit), all = params.stored_elements();
  TRIAD_CHECK(all % unit == 0, "{} stored elements in units of {}", all, unit);
  // The range of the embedding's gradient, extended at both ends to multiples of `unit`, because buckets begin and end
  // there. Backward finishes this gradient last, so each bucket with some of its elements is complete last too.
  ElementRange embed = range_of(params, index_of_param(params, "embed.weight"));
  embed.begin = embed.begin / unit * unit;
  embed.end = std::min(align_up(embed.end, unit), all);
  std::vector<GradBucket> buckets;
  // Cuts [begin, end) into buckets, starting at the end, where backward begins.
  const auto cut = [&](int64_t begin, int64_t end, bool late) {
    constexpr int64_t kLateTimes = 8;
    const int64_t size = late ? kLateTimes * most : most;
    for (; end > begin; end -= std::min(size, end - begin)) {
      GradBucket bucket{.elements = {std::max(begin, end - size), end}, .params = {}, .late = late};
      for (int64_t i = 0; i < params.count(); ++i) {
        if (range_of(params, i).overlaps(bucket.elements)) bucket.params.push_back(i);
      }
      buckets.push_back(bucket);
    }
  };
  cut(0, embed.begin, /*late=*/false);
  // The newest bucket holds the first layer, whose gradients backward finishes last.
  if (!buckets.empty()) buckets.back().late = true;
  cut(embed.end, all, /*late=*/true);
  cut(embed.begin, embed.end, /*late=*/true);
  return buckets;
}

BucketPlan::BucketPlan(const Params& params, const DistConfig& config, int64_t rank, int64_t world)
    : rank_(rank),
      world_(world),
      buckets_(plan_buckets(params, static_cast<int64_t>(config.bucket_mb * kMiB) / size_of(params.grads().dtype),
                            bucket_unit(config, world))),
      buckets_of_(static_cast<size_t>(params.count())) {
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (const int64_t i : buckets_[b].params) buckets_of_[static_cast<size_t>(i)].push_back(static_cast<int64_t>(b));
}

int64_t BucketPlan::largest() const {
  int64_t elements = 0;
  for (const GradBucket& bucket : buckets_) elements = std::max(elements, bucket.elements.size());
  return elements;
}

ElementRange BucketPlan::shard(const GradBucket& bucket) const {
  const int64_t size = bucket.elements.size() / world_, begin = bucket.elements.begin + rank_ * size;
  return {begin, begin + size};
}

}  // namespace triad
