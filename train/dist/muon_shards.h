// MuonShards: Muon with shards (dist.zero). One matrix's shards are on several ranks, but the Newton-Schulz iteration
// needs the whole matrix. So for each batch of matrices (MuonPlan):
//   1. every rank computes u for its shards, which all ranks gather, bucket by bucket, in bf16 (on the CPU in f32);
//   2. every rank iterates some matrices, and all ranks gather the results;
//   3. every rank updates its shards' parameters.
// Where gradients have dist.zero 0's bits, so have the new weights.
#pragma once
#include <functional>
#include <vector>

#include "kernels/update/muon.h"
#include "train/dist/grad_reducer.h"

namespace triad {

class MuonShards {
 public:
  MuonShards(Context&, Arena&, const MuonPlan&, GradReducer&);

  // Tensors for this rank's shard of a bucket (step() sets their pieces).
  using TensorsOf = std::function<MuonTensors(size_t bucket)>;
  // Queues all matrices' update. Collective.
  void step(Context&, const TensorsOf&, MuonOptions);

 private:
  // Elements that are contiguous in the flat buffer and in the batch's updates.
  struct Run {
    ElementRange elements;
    int64_t at = 0;
  };
  // A batch's part in one bucket.
  struct Share {
    size_t bucket = 0;
    std::vector<Run> runs;  // all ranks' runs
    // Table rows with the pieces in this rank's shard.
    int64_t first_row = 0, end_row = 0;
  };
  ElementRange shard(size_t bucket) const { return reducer_.plan().shard(reducer_.plan().buckets()[bucket]); }

  const MuonPlan& plan_;
  GradReducer& reducer_;
  std::vector<std::vector<Share>> shares_;  // batch -> shares
  // [rows, MuonPiece::kFields] i64: pieces whose `at` is an index in their bucket, and in their batch's updates.
  Tensor in_bucket_, in_batch_;
};

}  // namespace triad
