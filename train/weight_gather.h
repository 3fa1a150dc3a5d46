// WeightGather: after an update in shards (dist.zero 1) each rank has the new weights of its own parts alone. The
// others come on the comm stream while the next forward already runs, which waits for what it needs when it needs it.
#pragma once
#include <vector>

#include "engine/graph.h"
#include "model/weight_gate.h"
#include "train/grad_reducer.h"

namespace triad {

class WeightGather final : public WeightGate {
 public:
  WeightGather(Context&, const Params&, GradReducer&);

  // Sends what ctx.stream has made of this rank's part, in the compute dtype.
  void start(const GradBucket&);
  // Of a forward, also one that is recorded as a graph: each launch then waits anew.
  void begin() override { waited_.assign(waited_.size(), false); }
  void need(ConstTensor weight, const Stream& on) override;
  // ctx.stream waits for all: who reads weights outside a forward.
  void finish() { reducer_.finish_gather(); }

 private:
  const Params& params_;
  GradReducer& reducer_;
  std::vector<GraphEvent> arrived_;  // of each bucket, on the comm stream
  std::vector<bool> waited_;         // in this forward
};

}  // namespace triad
