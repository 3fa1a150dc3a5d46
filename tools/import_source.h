// The first half of `triad import`: a model folder of Hugging Face's transformers, checked except for the values of its
// tensors, and the Triad config of its model. `triad inspect` uses it to say whether import takes a folder.
#pragma once
#include <memory>
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

  // F32, BF16 or F16, or several of them: the dtypes of the tensors, separated by commas.
  std::string dtypes() const;
  bool is_16_bit() const;  // whether any tensor is BF16 or F16
};
// Reads config.json, the headers of the weights and the tokenizer. Throws an Error that names what import cannot take:
// a key of config.json, a tensor that is missing, unknown or has another shape or dtype, a tokenizer with more tokens
// than the model. with_tokenizer false: a tokenizer in the folder is not read.
ImportSource open_import(const std::string& folder, bool with_tokenizer = true);

// The config of the model with dense attention, as it is in the folder.
ModelConfig dense_model(const HuggingFaceConfig&);

struct ImportedConfig {
  AttentionKind attention = AttentionKind::dense;
  std::vector<std::string> sets;  // --set group.key=value
  std::string out;                // absolute path of the checkpoint's folder, which train.init_from names
};
// The config of the imported checkpoint, with groups that can be trained as they are. Throws a UsageError for a --set
// that would change the model that the folder's weights are of.
Config config_of_import(const ImportSource&, const ImportedConfig&);

}  // namespace triad
