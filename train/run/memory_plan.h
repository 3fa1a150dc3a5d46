// Computes the memory that a config's run needs before it starts: a dry step on a planning context counts every
// allocation, without memory or a GPU. fit/fit.h finds settings that fit.
#pragma once
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/context.h"
#include "engine/process/start_times.h"
#include "io/memory_snapshot.h"
#include "train/config/config.h"
#include "train/fit/cards.h"

namespace triad {

struct MemoryPlan {
  int64_t arena_bytes = 0;      // bytes in the whole arena, scratch included
  int64_t scratch_bytes = 0;    // scratch bytes: the ops' temporaries
  int64_t workspace_bytes = 0;  // cuBLASLt's workspace, bytes
  std::string report;           // a table: bytes by category
  int64_t peak_bytes() const { return arena_bytes + workspace_bytes; }
};
// Kernels index rows with 32 bits, so a micro-step has at most this many tokens.
constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
// comm: for a run on several ranks; their communication buffers are counted, but nothing is sent. blocks: if given,
// receives the planned tensors with their names. most_documents, here and below: as in TrainStep.
MemoryPlan plan_memory(const Config&, const PlannedDevice&, Comm* comm = nullptr, int64_t most_documents = 0,
                       std::vector<MemorySnapshot::Block>* blocks = nullptr);

// Thrown if the planned memory exceeds the free memory, before anything is allocated. The message names the first
// tensor that does not fit, its layer, the largest tensors, and a train.micro_batch_size, runtime.recompute or
// dist.zero that fits.
class PlanTooLarge : public OutOfMemory {
 public:
  PlanTooLarge(MemorySnapshot snapshot, const std::string& message)
      : OutOfMemory(message, snapshot.oom->asked, snapshot.oom->free), plan(std::move(snapshot)) {}
  MemorySnapshot plan;
};

// Plans the run and allocates its memory. Throws PlanTooLarge if the plan exceeds the device's free memory. times: if
// given, its phase "plan" ends between the two.
std::unique_ptr<Runtime> allocate_planned(const Config&, Device, Comm* comm = nullptr, int64_t most_documents = 0,
                                          StartTimes* times = nullptr);

}  // namespace triad
