// A run's initial state: fresh weights, another run's weights (train.init_from), or a checkpoint to resume. The state
// is found, read and compared between the ranks before any file in the run's folder changes.
#pragma once
#include <optional>
#include <string>

#include "train/checkpoint/state.h"
#include "train/run/data_source.h"
#include "train/run/trainer.h"
#include "train/step/train_step.h"

namespace triad {

// The model that train.init_from names; nullopt if the key is not set, or if the run resumes without train.lora. Throws
// UsageError if that model is in log.out_dir.
std::optional<ModelSource> find_init(const Config&, const std::string& resume_from);

// A line for the log: the weights with which the run begins, and what begins fresh.
std::string describe_init(const Config&, const ModelSource& init_from);

// Opens the run's data. Throws Error if the initial weights were trained with another tokenizer.
DataSource open_data_for(const TrainRequest&, const Tokenizer&, const std::string& resume_from,
                         const std::optional<ModelSource>& init_from);

// Throws an Error on every rank if the ranks differ in the tokenizer, or in the data's tokens, loss masks or documents.
// Collective.
void compare_data(Comm&, const Config&, const Tokenizer&, const DataSource&);

// Loads or initializes the parameters, and on a resume the optimizer's moments. If the ranks differ in the first step
// or in the weights' checksum, throws Error on every rank; also if the data differ from the resumed checkpoint's in
// their files, or in how many tokens, learned tokens or documents they have. If the request accepts that, changed_data
// receives what differs.
RunState begin_run(Context&, TrainStep&, Comm&, const TrainRequest&, const DataSource&, const std::string& resume_from,
                   const std::optional<ModelSource>& init_from, std::string& changed_data);

}  // namespace triad
