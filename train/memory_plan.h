// What a run of a config needs, known before it starts: a dry step on a planning context counts every byte, and needs
// neither memory nor a GPU. And what would fit instead.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "engine/comm/comm.h"
#include "engine/context.h"
#include "io/memory_snapshot.h"
#include "train/config.h"

namespace triad {

struct MemoryPlan {
  int64_t arena_bytes = 0;      // scratch included
  int64_t scratch_bytes = 0;    // temporaries of the ops
  int64_t workspace_bytes = 0;  // of the matrix library
  std::string report;           // by category
  int64_t peak_bytes() const { return arena_bytes + workspace_bytes; }
};
// comm: of a run of several ranks, whose share of it counts too; nothing is sent. blocks: becomes its tensors, by name.
MemoryPlan plan_memory(const Config&, Device, Comm* comm = nullptr,
                       std::vector<MemorySnapshot::Block>* blocks = nullptr);

// The largest train.micro_batch_size, all else as it is, whose peak is within `bytes`; nothing if one sequence is not.
struct BatchFit {
  int64_t micro_batch_size;
  MemoryPlan plan;
};
std::optional<BatchFit> fit_batch(Config, Device, int64_t bytes, Comm* comm = nullptr);

// The runtime.recompute, all else as it is, that runs the fewest FLOPs again among those whose peak is within `bytes`;
// nothing if recomputing every layer's block is not.
struct RecomputeFit {
  std::string recompute;
  double replayed_share;  // FLOPs run again, of those of a step that keeps everything
  MemoryPlan plan;
};
std::optional<RecomputeFit> fit_recompute(Config, Device, int64_t bytes, Comm* comm = nullptr);

// Running out before the first byte is touched. The message names the tensor that finds no room, its layer, the largest
// tensors, and a train.micro_batch_size or runtime.recompute with which the run fits.
class PlanTooLarge : public OutOfMemory {
 public:
  PlanTooLarge(MemorySnapshot snapshot, const std::string& message)
      : OutOfMemory(message, snapshot.oom->asked, snapshot.oom->free), plan(std::move(snapshot)) {}
  MemorySnapshot plan;
};

// Throws PlanTooLarge where the plan exceeds the device's free memory.
std::unique_ptr<Runtime> allocate_planned(const Config&, Device, Comm* comm = nullptr);

}  // namespace triad
