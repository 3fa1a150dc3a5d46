// LoRA (arXiv 2106.09685): a model whose weights are frozen, and for some of its linear layers a pair of small matrices
// that is trained: y = W x + scale * B A x. What an imported model lacks (gates, phi and a taught index) is trained
// too.
#pragma once
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "kernels/ops/lora.h"
#include "model/params.h"

namespace triad {

// The config key train.lora.
struct LoraConfig {
  int64_t rank = 0;
  double alpha = 0;  // 0: rank
  std::vector<std::string> targets = {"all-linear"};
  bool rslora = false;    // rank-stabilised LoRA (arXiv 2312.03732)
  std::string init_from;  // a folder of PEFT
  double scale() const;   // alpha / rank, or alpha / sqrt(rank) with rslora
};

// Throws UsageError if a target is none of the model's, or the rank exceeds a target's width.
void check_lora(const ModelConfig&, const LoraConfig&);

// The name of an adapter's matrices: blocks.0.attn.q_proj.lora_A.weight [rank,in] and lora_B.weight [out,rank] for the
// weight blocks.0.attn.q_proj.weight.
std::string lora_name(const std::string& weight, char matrix);

// The names of the weights that have adapters, in the order of param_specs().
std::vector<std::string> adapted_weights(const ModelConfig&, const LoraConfig&);
// Whether a base model's parameters with this role are trained beside the adapters, because an imported model lacks
// them: gates, phi and index.
constexpr bool stays_trained(ParamRole role) { return is_gate(role) || is_phi(role) || is_index(role); }

// All parameters: those of param_specs(ModelConfig), which are marked as frozen, and after them the adapters'. Without
// LoRA nothing is frozen.
std::vector<ParamSpec> param_specs(const ModelConfig&, const std::optional<LoraConfig>&);
// Those that are trained, or those that are not.
std::vector<ParamSpec> trained_specs(const ModelConfig&, const std::optional<LoraConfig>&);
std::vector<ParamSpec> frozen_specs(const ModelConfig&, const std::optional<LoraConfig>&);
int64_t count_elements(const std::vector<ParamSpec>&);

// Which columns of a layer's fused linear layers the adapters write, by LoraPlace; no pieces without adapters.
struct LoraLayer {
  std::array<std::vector<LoraPiece>, kLoraPlaces> pieces = {};
  double scale = 0;
};
std::vector<LoraLayer> lora_layers(const ModelConfig&, const std::optional<LoraConfig>&);

}  // namespace triad
