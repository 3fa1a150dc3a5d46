// How the flat gradient buffer is divided into buckets. One collective sums one bucket over the ranks. Pure functions.
#pragma once
#include <vector>

#include "engine/comm/comm.h"
#include "train/config/config.h"
#include "train/dist/rank_groups.h"
#include "train/step/flat_buffer.h"

namespace triad {

struct GradBucket {
  ElementRange elements;
  std::vector<int64_t> params;  // indices of parameters with elements in the bucket
  bool late = false;            // true: backward fills the bucket last, so its collective overlaps with nothing
};

// Divides the parameters' flat buffer into buckets with at most `elements` elements; boundaries are multiples of
// `unit`. Buckets are in the order in which backward is expected to fill them: matrices from the output head and the
// last layer to the first layer, then the small parameters, then the embedding, whose gradient backward finishes last.
// A gradient may span several buckets. Late buckets are larger, because no computation overlaps with them and a few
// large collectives are faster than many small ones: they have at most `late_times` times as many elements. by_segment:
// no bucket has elements from two segments.
inline constexpr int64_t kLateTimes = 8;
std::vector<GradBucket> plan_buckets(const Params&, int64_t elements, int64_t unit, bool by_segment = false,
                                     int64_t late_times = kLateTimes);
// Flat buffer segments (Params::Options::shard_elements) and buckets are multiples of this many elements, so no bucket
// is padding alone.
int64_t segment_unit(int64_t world);
// Whether gradients are computed in a layer ring (windowed FlatBuffer): then every micro-step adds them to a buffer
// with their sums.
bool has_grad_windows(const Config&, int64_t world);
bool has_weight_windows(const Config&, int64_t world);  // dist.zero 3
// How many CTAs NCCL's collectives use during backward: few, so that backward has more SMs, if the collectives are
// expected to finish within backward even with few CTAs; otherwise all.
CommCtas comm_ctas_during_backward(const Config&, int64_t world);

// BucketPlan: a run's buckets, and this rank's shard of each.
class BucketPlan {
 public:
  BucketPlan(const Params&, const Config&, int64_t rank, int64_t world);

  const std::vector<GradBucket>& buckets() const { return buckets_; }
  int64_t index_of(const GradBucket& bucket) const { return &bucket - buckets_.data(); }
  const std::vector<int64_t>& buckets_of(int64_t param) const { return buckets_of_[static_cast<size_t>(param)]; }
  int64_t largest() const;  // elements in the largest bucket
  // With shards: this rank's part of the bucket. Only this rank receives its summed gradients and updates its
  // parameters.
  ElementRange shard(const GradBucket&) const;
  Parts shards() const;  // all buckets' shards, in bucket order

 private:
  int64_t rank_, world_;  // rank within its replica, replica size (dist.replicas)
  std::vector<GradBucket> buckets_;
  std::vector<std::vector<int64_t>> buckets_of_;  // parameter -> indices of the buckets that hold its elements
};

}  // namespace triad
