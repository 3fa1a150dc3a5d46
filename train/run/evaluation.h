// evaluate(): computes the validation loss.
#pragma once
#include "train/run/run_setup.h"

namespace triad {

// Returns the mean loss over the first train.eval_batches micro-batches of the validation split, which are dealt out to
// the ranks in turn. Losses are added in the order of batches, so that the result does not depend on the number of
// ranks. With log.stats it also writes selection_sample.json from the first batch. step: number of optimizer steps
// done. With train.stages the rows are those of the stage of the last step, and the attention is that of model.* in
// dense stages too. Collective: all ranks call it.
double evaluate(RunSetup&, int64_t step);

}  // namespace triad
