// evaluate(): computes the validation loss.
#pragma once
#include <cmath>
#include <vector>

#include "train/run/run_setup.h"

namespace triad {

struct Evaluation {
  double loss = 0;
  double bits_per_byte = NAN;  // NaN if it is not known which text the tokens are
  // On the first rank, if it samples a taught index (TrainStep::samples_index): each layer's recall in the first batch.
  std::vector<IndexRecall> index;
};

// Computes the mean loss over the first train.eval_batches micro-batches of the validation split, which are dealt out
// to the ranks in turn. Losses are added in batch order, so the result doesn't depend on the rank count. With log.stats
// it also writes selection_sample.json from the first batch. step: optimizer steps done. With train.stages, rows are as
// in the last step's stage, and attention is model.*'s in dense stages too. Collective: all ranks call it.
Evaluation evaluate(RunSetup&, int64_t step);

}  // namespace triad
