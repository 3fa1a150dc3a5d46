// WeightGather: all-gathers weights; each rank has computed only its own shards. The all-gathers run on the comm stream
// while forward or backward already runs, which wait for each weight when they first read it.
//
// dist.zero 1 and 2: the weights are whole on every rank, and gathered once, bucket by bucket, after each update.
// dist.zero 3: the weights are in a weight ring (windowed FlatBuffer), filled a layer ahead of forward and backward.
// The small parameters (Segments::rest) are gathered once there too.
#pragma once
#include <vector>

#include "engine/graph.h"
#include "model/weight_gate.h"
#include "train/dist/grad_reducer.h"

namespace triad {

class WeightGather final : public WeightGate {
 public:
  // own [reducer.plan().shards().size()] f32 or the weights' dtype: with a weight ring, this rank's parameter shards,
  // from which its weights are cast. Empty without one: the update writes its shards into the whole weights.
  WeightGather(Context&, const Params&, GradReducer&, Tensor own);

  // Call for each bucket, from the last to the first, after this rank's shard was updated, on ctx.stream: queues the
  // bucket's all-gather, or marks its ring memory as out of date and fills what the next forward reads first.
  void updated(int64_t bucket);
  // A forward that is recorded as a graph contains its waits, so each launch waits again.
  void begin_forward() override { begin(/*forward=*/true); }
  void begin_backward() override { begin(/*forward=*/false); }
  void need(int64_t segment, const Stream& on) override;
  // Makes ctx.stream wait for all weights. Call before reading whole weights outside a forward.
  void finish() { reducer_.queue().join(); }

 private:
  void begin(bool forward);
  bool windowed(int64_t segment) const { return !own_.empty() && segment != params_.segments().rest(); }
  void gather(int64_t bucket);
  void fetch(int64_t segment);

  const Params& params_;
  GradReducer& reducer_;
  Tensor own_;
  Parts shards_;
  std::vector<GraphEvent> arrived_;            // last all-gather has ended, by bucket, on the comm stream
  std::vector<bool> waited_;                   // whether the current pass already waits, by bucket
  std::vector<bool> present_;                  // whether a segment's ring memory has its weights
  std::vector<std::vector<int64_t>> buckets_;  // buckets with some of a segment's elements
  bool forward_ = true;
};

}  // namespace triad
