// The transformers class in which a model leaves Triad, and the JSON files that describe the model to transformers.
#pragma once
#include <optional>
#include <string>

#include "io/huggingface/model_config.h"
#include "train/checkpoint/state.h"

namespace triad {

struct ExportClass {
  std::optional<HuggingFaceClass> huggingface;  // nullopt: model_type triad, whose code the folder contains
  std::string reason;                           // model_type triad only: what transformers' classes can't hold

  std::string word() const;  // "LlamaForCausalLM", "TriadForCausalLM"
};
// The class from which the model was imported (`origin` in its state.json, or null) if it can still hold the model;
// else Qwen2 for biases, Qwen3 for qk_norm, SmolLM3 for layers without rotation, and Llama; and model_type triad for
// what none can hold.
ExportClass export_class(const ModelConfig&, const Json& origin);

// Whether the model computes what its imported config.json says, so that adapters alone fit the imported model; true if
// none was imported. For classes of transformers.
bool computes_as_imported(const ModelSource&, const ExportClass&);

// A tensor's name in the class's files.
std::string exported_name(const ExportClass&, const std::string& triad_name);

// config.json and generation_config.json. An imported model's are kept, except for keys whose values have changed. The
// source's origin comes from origin_for_tokens(). dtype: f32 or bf16. bos_eos: the token that separates documents;
// nullopt if it is not known.
Json export_config(const ModelSource&, const ExportClass&, DType dtype, std::optional<int64_t> bos_eos);
Json export_generation_config(const ModelSource&, std::optional<int64_t> bos_eos);

}  // namespace triad
