// Finds settings for a config whose planned memory fits into a given size, for `triad plan --fit` and for the error
// when a run doesn't fit. Each search makes a few dozen plans (memory_plan.h). comm and most_documents: as in
// plan_memory.
#pragma once
#include <optional>
#include <string>

#include "train/fit/cards.h"
#include "train/fit/step_cost.h"
#include "train/run/memory_plan.h"

namespace triad {

// The largest train.micro_batch_size whose peak memory fits into `bytes` with all other keys unchanged; nullopt if not
// even 1 fits.
struct BatchFit {
  int64_t micro_batch_size;
  MemoryPlan plan;
};
std::optional<BatchFit> fit_batch(Config, const PlannedDevice&, int64_t bytes, Comm* comm = nullptr,
                                  int64_t most_documents = 0);

// The runtime.recompute value that recomputes the fewest FLOPs among those whose peak memory fits into `bytes`, with
// all other keys unchanged (`pointwise`, which recomputes none, for the fewest layers); nullopt if even recomputing
// every block does not fit. Expects that the more layers recompute a part, the less memory is needed.
struct RecomputeFit {
  std::string recompute;
  double replayed_share;  // recomputed FLOPs relative to a step's FLOPs without recomputation
  MemoryPlan plan;
};
std::optional<RecomputeFit> fit_recompute(Config, const PlannedDevice&, int64_t bytes, Comm* comm = nullptr,
                                          int64_t most_documents = 0, const DocumentMix& = {});

// The smallest dist.zero above the config's whose peak memory fits into `bytes`, with all other keys unchanged; nullopt
// if none fits, or with one rank.
struct ZeroFit {
  int64_t zero;
  MemoryPlan plan;
};
std::optional<ZeroFit> fit_zero(Config, const PlannedDevice&, int64_t bytes, Comm* comm, int64_t most_documents = 0);

// The keys that fit_settings chooses.
struct Settings {
  int64_t zero, micro_batch_size, accumulate_grad_batches;
  std::string recompute;
  StepCost cost;
  MemoryPlan plan;
};
// The settings with the lowest step_cost among all that fit into `bytes`: dist.zero (with several ranks),
// train.micro_batch_size and runtime.recompute. A step keeps its tokens, so micro-batch sizes divide a step's
// sequences, and train.accumulate_grad_batches follows. With equal costs: the smallest dist.zero, then the largest
// micro-batch. nullopt if nothing fits.
std::optional<Settings> fit_settings(const Config&, const PlannedDevice&, int64_t bytes, Comm* comm = nullptr,
                                     int64_t most_documents = 0, const DocumentMix& = {});
// The settings as command arguments: "--set dist.zero=1 --set ...". Without dist.zero for one rank.
std::string arguments_of(const Settings&, int64_t ranks);

// Config changes that make a run fit into `bytes`, as text for an error message: one key changed, or else fit_settings'
// changes.
std::string fit_advice(const Config&, const PlannedDevice&, int64_t bytes, Comm* comm = nullptr,
                       int64_t most_documents = 0);

// For settings that do not fit into `bytes`: the least memory that the config needs, and what would need less: split
// masters, state and gradients in bf16, state on the host, more ranks. Part of a sentence.
std::string least_need(const Config&, const PlannedDevice&, int64_t bytes, Comm* comm = nullptr,
                       int64_t most_documents = 0);

}  // namespace triad
