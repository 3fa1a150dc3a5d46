// What a run begins with: fresh weights, those of another run (train.init_from), or a checkpoint of its own. All of it
// is found, read and compared between the ranks before the run's folder changes.
#pragma once
#include <optional>
#include <string>

#include "train/data_source.h"
#include "train/state.h"
#include "train/train_step.h"

namespace triad {

// train.init_from's weights; none where the run is a resume, which has its own. Weights in log.out_dir are a
// UsageError.
std::optional<ModelSource> find_init(const Config&, const std::string& resume_from);

// The run's data. An Error where the weights that it begins with were trained on another tokenizer's tokens.
DataSource open_data_for(const Config&, const Tokenizer&, const std::string& resume_from,
                         const std::optional<ModelSource>& init_from);

// Fills the step's parameters, on a resume the optimizer too. An Error, on each rank, where they do not all begin at
// the same step, with the same weights and as many tokens of data.
RunState begin_run(Context&, TrainStep&, Comm&, const Config&, const DataSource&, const std::string& resume_from,
                   const std::optional<ModelSource>& init_from);

}  // namespace triad
