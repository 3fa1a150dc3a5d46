// evaluate(): the validation loss.
#pragma once
#include "train/run_setup.h"

namespace triad {

// Mean loss over the first train.eval_batches micro-batches of the validation split, dealt out to the ranks in turn.
// Losses are added in the order of batches, so that the result does not depend on the number of ranks. With log.stats
// also writes selection_sample.json from the first batch. step: steps done. Collective.
double evaluate(RunSetup&, int64_t step);

}  // namespace triad
