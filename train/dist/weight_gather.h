// WeightGather: after a sharded update (dist.zero 1) each rank has the new weights of its own shards only. All-gathers
// them on the comm stream, bucket by bucket, while the next forward already runs; the forward waits for each weight
// when it first reads it.
#pragma once
#include <vector>

#include "engine/graph.h"
#include "model/weight_gate.h"
#include "train/dist/grad_reducer.h"

namespace triad {

class WeightGather final : public WeightGate {
 public:
  WeightGather(Context&, const Params&, GradReducer&);

  // Queues the all-gather of the bucket's weights, in the compute dtype, after earlier work on ctx.stream.
  void start(const GradBucket&);
  // Call before each forward. A forward that is recorded as a graph waits again in each launch.
  void begin() override { waited_.assign(waited_.size(), false); }
  void need(ConstTensor weight, const Stream& on) override;
  // ctx.stream waits for all weights: call before reading weights outside a forward.
  void finish() { reducer_.queue().join(); }

 private:
  const Params& params_;
  GradReducer& reducer_;
  std::vector<GraphEvent> arrived_;  // by bucket: end of its all-gather on the comm stream
  std::vector<bool> waited_;         // by bucket: this forward waits for it already
};

}  // namespace triad
