// MuonShards: Muon with shards (dist.zero). The shards of one matrix are on several ranks, but the Newton-Schulz
// iteration needs the whole matrix. So for each batch of matrices (MuonPlan):
//   1. every rank computes u of its shards, which all ranks gather, bucket by bucket, in bf16 (on the CPU in f32);
//   2. every rank iterates some of the matrices, and all ranks gather the results;
//   3. every rank updates the parameters of its shards.
// Where gradients have the bits of dist.zero 0, so have the new weights.
#pragma once
#include <functional>
#include <vector>

#include "kernels/update/muon.h"
#include "train/dist/grad_reducer.h"

namespace triad {

class MuonShards {
 public:
  MuonShards(Context&, Arena&, const MuonPlan&, GradReducer&);

  // The tensors of this rank's shard of a bucket (their pieces are set by step()).
  using TensorsOf = std::function<MuonTensors(size_t bucket)>;
  // Queues the update of all matrices. Collective.
  void step(Context&, const TensorsOf&, MuonOptions);

 private:
  // Elements that are contiguous in the flat buffer and in the batch's updates.
  struct Run {
    ElementRange elements;
    int64_t at = 0;
  };
  // The part of a batch in one bucket.
  struct Share {
    size_t bucket = 0;
    std::vector<Run> runs;  // of all ranks
    // Rows of the tables with the pieces of this rank's shard.
    int64_t first_row = 0, end_row = 0;
  };
  ElementRange shard(size_t bucket) const { return reducer_.plan().shard(reducer_.plan().buckets()[bucket]); }

  const MuonPlan& plan_;
  GradReducer& reducer_;
  std::vector<std::vector<Share>> shares_;  // by batch
  // [rows, MuonPiece::kFields] i64: pieces whose `at` is an index in their bucket, and in the updates of their batch.
  Tensor in_bucket_, in_batch_;
};

}  // namespace triad
