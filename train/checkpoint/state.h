// The files of a checkpoint: model.safetensors (master weights by name; without master weights the bf16 weights),
// optimizer.safetensors (exp_avg/<name>, exp_avg_sq/<name>, F32 or BF16) and state.json (config, step, data cursor).
// Names and shapes are those of ParamSpec, without the padding of the stored tensors.
#pragma once
#include <string>
#include <vector>

#include "io/data/rows.h"
#include "io/json_config.h"
#include "io/tokenizer/tokenizer.h"
#include "model/params.h"
#include "train/config/config.h"
#include "train/step/optimizer.h"

namespace triad {

// What a resume needs in addition to tensors. Random number generators are counter-based, so these counters are their
// state.
struct RunState {
  int64_t step = 0;  // optimizer steps done
  // Tokens of the data's order (io/data/README.md) before the next row; in all epochs, and with those that a change of
  // stage has left out.
  int64_t cursor = 0;
  int64_t tokens = 0;  // tokens trained on, by all ranks
  // Null, or for a model that `triad import` has read, and for those trained from it, what an export needs of the
  // folder from which it came (io/huggingface/README.md).
  Json origin;
  // {train, val}: {tokens, learned, documents, files}, the numbers of these in the run's text or shards, and the files
  // with their checksums (io/data/data_files.h), for val only if they are others. Null for other data, and where they
  // are not known. begin_run() fills it in and compares it.
  Json data = nullptr;
  RowGroup group = {};  // data.packing best_fit: a group of rows at or before the cursor
};

// What precedes a parameter's name in the names of its moments.
inline constexpr const char *kAvgPrefix = "exp_avg/", *kAvgSqPrefix = "exp_avg_sq/";

// The contents of state.json. files: from checksums_of_files(), or null.
Json state_json(const Config&, const RunState&, const Json& files = nullptr);
// Writes model.safetensors. The file depends only on the weights: equal weights give equal bytes.
void save_weights(Context&, const Params&, const std::string& path);
// Reads any safetensors file, or several with an index (io/weight_index.h), with the model's names and shapes (F32,
// BF16, F16 or F64) and verifies the checksums if there are any. Throws Error with the name of a missing, unknown or
// misshapen tensor.
void load_weights(Context&, Params&, const std::string& path);
// Reads the weights of a dense model into an NSA or mixed model (model/from_dense.h). The parameters that no tensor of
// the dense model begins get the values of Params::init.
void load_dense_weights(Context&, Params&, const std::string& path, uint64_t seed);
// The same into the parameters that this rank of a run keeps, and from them into the weights. shards: the ranks among
// which the parameters are divided (TrainStep::shards), who all call it; null if each rank keeps all.
void read_weights(Context&, const Params&, Optimizer&, const std::string& path, Comm* shards);
// Like read_weights(), but path has the weights of a dense model, and the missing ones are made as by
// load_dense_weights().
void read_dense_weights(Context&, const Params&, Optimizer&, const std::string& path, uint64_t seed, Comm* shards);

// {NAME: checksum} of the tensor files in a checkpoint's folder (SafetensorsFile::checksum), which state.json keeps as
// `files`. By these a reader knows files that another save has written. They are kept there, not in the files, because
// these depend on their tensors alone.
Json checksums_of_files(const std::string& folder);

// Throws Error with the file's name if the tokenizer differs from the checkpoint's copy. A checkpoint without a copy
// passes.
void check_tokenizer(const std::string& folder, const Tokenizer&);
// Reads a checkpoint. Throws Error if its files are not of one save, by checksums_of_files(); a file without
// checksums, which another program has written, passes. Throws Error too if its config differs in a key on which a
// resume depends: model.*, nsa.*, data.* or train.seq_len (with train.stages, the longest of the stages). Where the
// data and the tokenizer lie may differ, if the checkpoint knows what they hold, for begin_run() to compare; or with
// accept_changed_data. Likewise for one that read a JSONL file as plain text, as runs did before data.documents
// existed. Each rank reads only the values that it keeps. Collective: all ranks call it.
RunState load_checkpoint(Context&, const std::string& folder, const Params&, Optimizer&, const Config&, Comm* shards,
                         bool accept_changed_data = false);

// The config that a checkpoint was written with.
Json config_of_checkpoint(const std::string& folder);

// The keys in which a checkpoint's config differs from this one, a line each.
std::vector<std::string> changed_since(const std::string& folder, const Config& config);

// The keys in which two configs differ, a line each: "train.lr 1e-3 -> 2e-3".
std::vector<std::string> differences(const Config& before, const Config& now);

// `triad init`: a folder with model.safetensors, state.json and the tokenizer. state.json has a checksum of each.
void save_initial(Context&, const std::string& folder, const Params&, const Config&);
// Whether save_initial() has written the file of this name, and nothing has changed it since.
bool is_initial_file(const std::string& folder, const std::string& name);

// Finds a model: a checkpoint or the folder of `triad init` (with state.json), the folder of a finished run (with
// config.json and model.safetensors), the folder of a run with checkpoints (the newest complete one), or a safetensors
// file in one of these.
struct ModelSource {
  Config config;
  std::string folder;   // holds the weights, and the tokenizer's files unless it is `byte`
  std::string weights;  // path of a safetensors file, or of the index of several
  Json origin;          // RunState::origin of the checkpoint, or of the newest one of a run's folder
};
ModelSource find_model(const std::string& path);

}  // namespace triad
