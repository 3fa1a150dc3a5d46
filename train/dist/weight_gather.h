// WeightGather: all-gathers the new weights after a sharded update (dist.zero 1), in which each rank has computed only
// those of its own shards. The all-gathers run on the comm stream, bucket by bucket, while the next forward already
// runs; the forward waits for each weight when it first reads it.
#pragma once
#include <vector>

#include "engine/graph.h"
#include "model/weight_gate.h"
#include "train/dist/grad_reducer.h"

namespace triad {

class WeightGather final : public WeightGate {
 public:
  WeightGather(Context&, const Params&, GradReducer&);

  // Queues the all-gather of one bucket's weights, in the compute dtype, after earlier work on ctx.stream.
  void start(const GradBucket&);
  // Call before each forward. A forward that is recorded as a graph contains its waits, so each launch waits again.
  void begin() override { waited_.assign(waited_.size(), false); }
  void need(ConstTensor weight, const Stream& on) override;
  // Makes ctx.stream wait for all weights. Call before reading weights outside a forward.
  void finish() { reducer_.queue().join(); }

 private:
  const Params& params_;
  GradReducer& reducer_;
  std::vector<GraphEvent> arrived_;  // for each bucket: the end of its all-gather on the comm stream
  std::vector<bool> waited_;         // for each bucket: whether the current forward already waits for it
};

}  // namespace triad
