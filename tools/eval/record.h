// Keeps what `triad eval` has measured in the run's folder, for `triad report`.
#pragma once
#include <string>
#include <vector>

#include "io/json_config.h"
#include "train/checkpoint/state.h"

namespace triad {

// If the model is a run's, appends {time, checkpoint, step, data, and result's numbers and words} to its eval.jsonl.
// checkpoint: what the command line names. A folder that cannot be written is a warning.
void record_evaluation(const std::string& checkpoint, const ModelSource&, const std::vector<std::string>& data,
                       const Json& result);

}  // namespace triad
