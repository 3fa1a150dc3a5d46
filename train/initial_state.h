// The initial state of a run: fresh weights, the weights of another run (train.init_from), or a checkpoint to resume.
// It is found, read and compared between the ranks before any file of the run's folder changes.
#pragma once
#include <optional>
#include <string>

#include "train/data_source.h"
#include "train/state.h"
#include "train/train_step.h"

namespace triad {

// The model that train.init_from names; nullopt without one and on a resume. Throws UsageError if it is in log.out_dir.
std::optional<ModelSource> find_init(const Config&, const std::string& resume_from);

// Opens the run's data. Throws Error if the initial weights were trained with another tokenizer.
DataSource open_data_for(const Config&, const Tokenizer&, const std::string& resume_from,
                         const std::optional<ModelSource>& init_from);

// Sets the step's parameters, and on a resume the optimizer's moments. Throws Error on each rank if the ranks differ in
// the first step, the weights' checksum or the number of tokens in the data.
RunState begin_run(Context&, TrainStep&, Comm&, const Config&, const DataSource&, const std::string& resume_from,
                   const std::optional<ModelSource>& init_from);

}  // namespace triad
