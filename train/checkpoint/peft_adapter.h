// Adapters in the layout of Hugging Face's PEFT: a folder with adapter_config.json and adapter_model.safetensors.
#pragma once
#include <string>

#include "io/json_config.h"
#include "model/lora.h"
#include "train/step/optimizer.h"

namespace triad {

inline constexpr const char *kPeftConfig = "adapter_config.json", *kPeftWeights = "adapter_model.safetensors";

// What adapter_config.json says of a model's adapters. base: the base model's name or path for transformers, or null.
Json peft_config(const ModelConfig&, const LoraConfig&, const Json& base);
// The name in the folder of an adapter's matrix (lora_name()), which for an NSA model's k and v is that of the dense
// model's. Throws Error if transformers' classes have no such projection.
std::string peft_tensor_name(const ParamSpec& adapter);

// Sets the adapters to those of the folder, train.lora.init_from. Throws Error if the folder's rank, scale or
// projections are not the config's, if it has what Triad has not (DoRA, biases, other modules), or if a tensor is
// missing, unknown or misshapen.
void read_peft_adapter(Context&, const Params&, Optimizer&, const LoraConfig&);

}  // namespace triad
