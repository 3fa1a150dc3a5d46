// A checkpoint's files: model.safetensors (master weights by name; without master weights the bf16 weights),
// optimizer.safetensors (exp_avg/<name>, exp_avg_sq/<name>, F32 or BF16) and state.json (config, step, data cursor).
// Names and shapes are ParamSpec's, without the stored tensors' padding.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "io/data/rows.h"
#include "io/json_config.h"
#include "io/tokenizer/tokenizer.h"
#include "model/params.h"
#include "train/checkpoint/param_reader.h"
#include "train/config/config.h"
#include "train/step/optimizer.h"

namespace triad {

class ChatFormat;  // io/chat/chat_format.h

// What a run's evaluations have found, for train.keep_best and train.patience. With train.stages only those of a stage
// are compared, because rows of another length have other losses.
struct Validation {
  int64_t best_step = -1;  // the step of the lowest loss; -1: no evaluation so far
  double best_loss = 0;
  int64_t since = 0;  // evaluations after it

  bool any() const { return best_step >= 0 || since > 0; }
  // Takes the loss of an evaluation after `step` steps. One that is not finite is no improvement.
  void add(const TrainConfig&, int64_t step, double loss);
  bool out_of_patience(const TrainConfig& train) const { return train.patience > 0 && since >= train.patience; }
};

// What a resume needs in addition to tensors. Random number generators are counter-based, so these counters are their
// state.
struct RunState {
  int64_t step = 0;  // optimizer steps done
  // Tokens in data order (io/data/README.md) before the next row, over all epochs, including those that a stage change
  // has left out.
  int64_t cursor = 0;
  int64_t tokens = 0;  // tokens trained on, by all ranks
  // Null, or for a model that `triad import` has read, and for those trained from it, what an export needs from the
  // folder it came from (io/huggingface/README.md).
  Json origin;
  // {train, val}: {tokens, learned, documents, files}: how many of these the run's text or shards have, and the files
  // with their checksums (io/data/data_files.h), for val only if they differ. train of a mixture also has `mixture`:
  // for each component {share, tokens, files}, of which the last is a number. Null for other data, and where they are
  // not known. begin_run() fills it in and compares it.
  // `chat` is how its conversations are written (ChatFormat::to_json()), absent if there are none.
  Json data = nullptr;
  Json base = nullptr;    // base_checksums() of a run with train.lora, else null
  RowGroups groups = {};  // data.packing best_fit: the row groups at or before the cursor
  Validation validation = {};
};

// What precedes a parameter's name in its moments' names.
inline constexpr const char *kAvgPrefix = "exp_avg/", *kAvgSqPrefix = "exp_avg_sq/";

// state.json's contents. files: from checksums_of_files(), or null.
Json state_json(const Config&, const RunState&, const Json& files = nullptr);
// Writes model.safetensors. The file depends only on the weights: equal weights give equal bytes.
void save_weights(Context&, const Params&, const std::string& path);
// Reads any safetensors file, or several with an index (io/weight_index.h), with the model's names and shapes (F32,
// BF16, F16 or F64) and verifies the checksums if there are any. Throws an Error that names a missing, unknown or
// misshapen tensor.
void load_weights(Context&, Params&, const std::string& path);
// Reads a dense model's weights into an NSA or mixed model (model/from_dense.h). Parameters that no dense tensor begins
// get Params::init's values.
void load_dense_weights(Context&, Params&, const std::string& path, uint64_t seed);
// The same into the parameters that this rank keeps, and from them into the weights. shards: the ranks among which the
// parameters are divided (TrainStep::shards), who all call it; null if each rank keeps all.
void read_weights(Context&, const Params&, Optimizer&, const std::string& path, Comm* shards);
// Like read_weights(), but of another model's weights: each parameter begins with the tensor that name_of names, or
// fresh if that is empty, with values drawn from the seed. unread: tensors that may be left over.
void read_other_weights(Context&, const Params&, Optimizer&, const std::string& path, const NameOf& name_of,
                        const std::vector<ParamSpec>& unread, uint64_t seed, Comm* shards);

// {NAME: checksum} for the tensor files in a checkpoint's folder (SafetensorsFile::checksum), which state.json keeps as
// `files`. By these a reader knows files that another save has written. They are kept there, not in the files, because
// these depend on their tensors alone.
Json checksums_of_files(const std::string& folder);

// Throws Error with the file's name if the tokenizer differs from the checkpoint's copy. A checkpoint without a copy
// passes.
void check_tokenizer(const std::string& folder, const Tokenizer&);
// Reads a checkpoint. Throws Error if its files aren't from one save, by checksums_of_files(); a file without
// checksums, which another program has written, passes. Throws Error too if its config differs in a key on which a
// resume depends: model.*, nsa.*, data.* or train.seq_len (with train.stages, the longest stage's). Where the data and
// the tokenizer lie may differ, if the checkpoint knows what they hold, for begin_run() to compare; or with
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

// `triad init`: a folder with model.safetensors, state.json and the tokenizer. state.json, the last of them, has a
// checksum of each. Returns false, and changes nothing, if the folder holds other weights: neither is_initial_file()
// nor with the bytes of these, as a killed `triad init` leaves them.
bool save_initial(Context&, const std::string& folder, const Params&, const Config&);
// Whether save_initial() has written the file of this name, and nothing has changed it since.
bool is_initial_file(const std::string& folder, const std::string& name);

// Finds a model: a checkpoint or `triad init`'s folder (with state.json), a finished run's folder (with config.json and
// model.safetensors), a run's folder with checkpoints (the newest complete one), or a safetensors file in one of these.
struct ModelSource {
  Config config;
  std::string folder;   // holds the weights, and the tokenizer's files unless it is `byte`
  std::string weights;  // path to a safetensors file, or to an index for several
  Json origin;          // RunState::origin in the checkpoint, or in the newest one in a run's folder
  Json base;            // RunState::base; null if it is not known
  Json chat;            // how the conversations in its data are written (ChatFormat::to_json()); null if there are none
};
// How a model's conversations are written: as it was trained, else as its import says; none if neither is known.
std::optional<ChatFormat> trained_chat(const ModelSource&);
ModelSource find_model(const std::string& path);

}  // namespace triad
