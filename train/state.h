// Checkpoints: model.safetensors (fp32 master weights by name), optimizer.safetensors (exp_avg/<name>,
// exp_avg_sq/<name>), state.json (config, step, data cursor). Names and shapes are those of SPEC.md 1.2, whatever the
// engine stores.
#pragma once
#include <string>
#include <vector>

#include "io/json_config.h"
#include "io/tokenizer/tokenizer.h"
#include "model/params.h"
#include "train/config.h"
#include "train/optimizer.h"

namespace triad {

// What a resume needs besides tensors. The generators are counter-based, so their state is the step and the cursor.
struct RunState {
  int64_t step = 0;       // optimizer steps done
  int64_t sequences = 0;  // sequences the data loader has handed out
  int64_t tokens = 0;     // tokens trained on
};

// model.safetensors depends on the weights alone: equal weights, equal bytes.
void save_weights(Context&, const Params&, const std::string& path);
// Any file with the same names and shapes (F32, BF16, F16 or F64), checksums verified where present. Missing, unknown
// or misshapen tensors are an Error that names them.
void load_weights(Context&, Params&, const std::string& path);

// Everything of a run that lies in tensors: fp32, on the host, laid out as the parameters' whole buffers.
struct StateTensors {
  Tensor master, exp_avg, exp_avg_sq;
};
// Whole or not at all: written beside, synced, renamed; then `latest` points at it. Of params it reads names and places
// alone, so that another thread may train them meanwhile. Returns its folder.
// tokenizer: its files, which go with them.
std::string save_checkpoint(const std::string& parent, const Params&, const StateTensors&, const Config&,
                            const RunState&, const std::vector<Tokenizer::File>& tokenizer);
// Throws if a key differs on which a resume depends: the model's, the data's, train.seq_len.
// A resume goes on with the tokenizer of its checkpoint: an Error that names the file where this one's, data.tokenizer
// by name, is another. A checkpoint that has no copy of its own is taken as it is.
void check_tokenizer(const std::string& folder, const Tokenizer&);
RunState load_checkpoint(Context&, const std::string& folder, Params&, Optimizer&, const Config&);

// The config that a checkpoint was written with.
Json config_of_checkpoint(const std::string& folder);

// The keys in which a checkpoint's config differs from this one, a line each.
std::vector<std::string> changed_since(const std::string& folder, const Config& config);

// The keys in which two configs differ, a line each: "train.lr 1e-3 -> 2e-3".
std::vector<std::string> differences(const Config& before, const Config& now);

// `triad init`: a folder with model.safetensors, state.json and the tokenizer.
void save_initial(Context&, const std::string& folder, const Params&, const Config&);

// Where a model is: a checkpoint or `init` folder (state.json), a finished run's folder (config.json beside
// model.safetensors), a run's folder with checkpoints (the newest whole one), or a file of weights in one of these.
struct ModelSource {
  Config config;
  std::string folder;   // of what follows, and of the tokenizer where it is no byte
  std::string weights;  // a safetensors file
};
ModelSource find_model(const std::string& path);

}  // namespace triad
