// How the flat gradient buffer is divided into buckets, each of which one collective sums over the ranks. Pure.
#pragma once
#include <vector>

#include "engine/comm/comm.h"
#include "train/config.h"
#include "train/flat_buffer.h"

namespace triad {

struct GradBucket {
  ElementRange elements;
  std::vector<int64_t> params;  // indices of the parameters with elements in the bucket
  bool late = false;            // filled at the end of backward: its collective overlaps with nothing
};

// Divides the parameters' flat buffer into buckets of at most `elements` elements whose boundaries are multiples of
// unit, in the order in which backward is expected to fill them: matrices from the output head and the last layer to
// the first layer, then the small parameters, then the embedding, whose gradient backward finishes last. A gradient may
// span buckets. Late buckets are larger, because nothing overlaps with them and few large collectives are faster than
// many small ones.
std::vector<GradBucket> plan_buckets(const Params&, int64_t elements, int64_t unit);
// Elements of which bucket boundaries and the flat buffers' size are multiples (Params::Options::shard_elements).
int64_t bucket_unit(const DistConfig&, int64_t world);
// CTAs for NCCL's collectives during backward: few if the collectives are expected to finish within backward
// even so, which leaves more SMs to backward.
CommCtas comm_ctas_during_backward(const Config&, int64_t world);

// BucketPlan: the buckets of a run, and this rank's shard of each.
class BucketPlan {
 public:
  BucketPlan(const Params&, const DistConfig&, int64_t rank, int64_t world);

  const std::vector<GradBucket>& buckets() const { return buckets_; }
  int64_t index_of(const GradBucket& bucket) const { return &bucket - buckets_.data(); }
  const std::vector<int64_t>& buckets_of(int64_t param) const { return buckets_of_[static_cast<size_t>(param)]; }
  int64_t largest() const;  // elements of the largest bucket
  // dist.zero 1: this rank's shard of the bucket. Only this rank has its summed gradients and updates its parameters.
  ElementRange shard(const GradBucket&) const;

 private:
  int64_t rank_, world_;
  std::vector<GradBucket> buckets_;
  std::vector<std::vector<int64_t>> buckets_of_;  // by parameter: indices of its buckets
};

}  // namespace triad
