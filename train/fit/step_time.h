// A step's time on a card, by a model with few constants that is fitted to kept rows (tests/baselines/rows.jsonl);
// tests/train/test_step_time.cpp compares it with rows to which it is not. Pure functions.
#pragma once
#include <optional>
#include <vector>

#include "train/config/config.h"
#include "train/config/schedule.h"
#include "train/fit/cards.h"

namespace triad {

// One rank's seconds in a step, in parts.
struct StepTime {
  double products = 0;       // products with weights
  double attention = 0;      // branches, selection, a taught index
  double memory = 0;         // norms, rotations, gates, the loss: kernels that only read and write memory
  double update = 0;         // the optimizer, sums of micro-steps' gradients
  double launches = 0;       // launches, and kernels too small to fill the card
  double communication = 0;  // what doesn't overlap of gradients, weights and exchanges
  double total() const { return products + attention + memory + update + launches + communication; }
};
// A step of a config, which has one stage. exchanged: as in step_cost(). nullopt for fp32 and for adapters
// (train.lora): there are no rows of them.
std::optional<StepTime> step_time(const Config&, const Card&, int64_t ranks, const DocumentMix& = {},
                                  int64_t exchanged = 0);

// All steps after the first `done` ones, without evaluations and checkpoints.
struct RunTime {
  StepTime last_step;                          // a step of the last stage
  double tokens = 0, seconds = 0, joules = 0;  // tokens and joules: all ranks together
  double tokens_per_s() const { return tokens / seconds; }
};
// attended: the documents in each stage's rows. exchanged: bytes that ranks which share sequences exchange in a
// micro-step of the last stage.
std::optional<RunTime> run_time(const Config&, const Card&, int64_t ranks, int64_t done,
                                const std::vector<DocumentMix>& attended, int64_t exchanged = 0);

}  // namespace triad
