// The names of a dense model's tensors: Triad's (model/README.md) and those in transformers' Llama, Mistral, Qwen2,
// Qwen3 and SmolLM3, the same in all five; and the names of any model's tensors in TriadForCausalLM.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace triad {

// "blocks.3.attn.k_win_proj.weight" <-> "model.layers.3.self_attn.k_proj.weight". nullopt: the other side has no such
// tensor. Layers are plain decimal numbers without leading zeros.
std::optional<std::string> huggingface_name(std::string_view triad_name);
std::optional<std::string> triad_name(std::string_view huggingface_name);

// "blocks.3.attn.gate.fc1.weight" -> "model.blocks.3.attn.gate.fc1.weight"
std::string name_in_triad_class(const std::string& triad_name);

// True for a tensor that old files hold and that is computed, not learned, so that transformers ignores it, too:
// "model.layers.3.self_attn.rotary_emb.inv_freq".
bool is_computed_tensor(std::string_view huggingface_name);

}  // namespace triad
