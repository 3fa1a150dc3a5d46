// The first half of `triad import`: a Hugging Face transformers model folder, checked except for tensor values, and its
// model's Triad config. `triad inspect` uses it to say whether import takes a folder.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/huggingface/model_config.h"
#include "io/tokenizer/tokenizer.h"
#include "io/weight_index.h"
#include "train/config/config.h"

namespace triad {

struct ImportSource {
  std::string folder;
  HuggingFaceConfig config;
  WeightIndex weights;
  std::unique_ptr<Tokenizer> tokenizer;  // NoTokenizer if the folder has none
  Json origin;                           // RunState::origin

  // The folder's name of the tensor that a model has under this name. Throws an Error if its class has none.
  std::string tensor_name(const std::string& triad_name) const;
  // F32, BF16 or F16, or several: the tensors' dtypes, separated by commas.
  std::string dtypes() const;
  bool is_16_bit() const;  // whether any tensor is BF16 or F16
};
// Reads config.json, the weights' headers and the tokenizer. Throws an Error that names what import can't take: a
// config.json key, a tensor that is missing, unknown or has another shape or dtype, a tokenizer with more tokens than
// the model. with_tokenizer false: a tokenizer in the folder is not read.
ImportSource open_import(const std::string& folder, bool with_tokenizer = true);

// The model's config as it is in the folder: with dense attention, or that of a model which Triad has exported.
ModelConfig model_in_folder(const HuggingFaceConfig&);

struct ImportedConfig {
  std::optional<AttentionKind> attention = {};  // absent: as in the folder
  std::vector<std::string> sets;                // --set group.key=value
  std::string out;                              // the checkpoint folder's absolute path, which train.init_from names
};
// The imported checkpoint's config, with groups that can be trained as they are. Throws a UsageError for a --set that
// or an attention that would change the model to which the folder's weights belong.
Config config_of_import(const ImportSource&, const ImportedConfig&);

}  // namespace triad
