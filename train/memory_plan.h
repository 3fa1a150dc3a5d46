// Memory that a run of a config needs, computed before it starts: a dry step on a planning context counts every
// allocation and needs neither memory nor a GPU. Also finds settings that fit into a given number of bytes.
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
  int64_t workspace_bytes = 0;  // cuBLASLt's workspace
  std::string report;           // a table of bytes by category
  int64_t peak_bytes() const { return arena_bytes + workspace_bytes; }
};
// comm: given for a run of several ranks, whose communication buffers count too; nothing is sent. blocks: receives the
// planned tensors, by name.
MemoryPlan plan_memory(const Config&, Device, Comm* comm = nullptr,
                       std::vector<MemorySnapshot::Block>* blocks = nullptr);

// The largest train.micro_batch_size whose peak fits into `bytes`, other keys unchanged; nullopt if not even 1 fits.
struct BatchFit {
  int64_t micro_batch_size;
  MemoryPlan plan;
};
std::optional<BatchFit> fit_batch(Config, Device, int64_t bytes, Comm* comm = nullptr);

// The runtime.recompute with the fewest recomputed FLOPs whose peak fits into `bytes`, other keys unchanged; nullopt if
// not even recomputing every block fits.
struct RecomputeFit {
  std::string recompute;
  double replayed_share;  // recomputed FLOPs over the FLOPs of a step without recomputation
  MemoryPlan plan;
};
std::optional<RecomputeFit> fit_recompute(Config, Device, int64_t bytes, Comm* comm = nullptr);

// Thrown if the planned memory exceeds the free memory, before anything is allocated. The message names the first
// tensor that does not fit, its layer, the largest tensors, and a train.micro_batch_size or runtime.recompute that
// fits.
class PlanTooLarge : public OutOfMemory {
 public:
  PlanTooLarge(MemorySnapshot snapshot, const std::string& message)
      : OutOfMemory(message, snapshot.oom->asked, snapshot.oom->free), plan(std::move(snapshot)) {}
  MemorySnapshot plan;
};

// Plans the run and allocates its memory. Throws PlanTooLarge if the plan exceeds the device's free memory.
std::unique_ptr<Runtime> allocate_planned(const Config&, Device, Comm* comm = nullptr);

}  // namespace triad
