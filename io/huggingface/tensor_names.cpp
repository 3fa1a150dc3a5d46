#include "io/huggingface/tensor_names.h"

#include <algorithm>
#include <array>

namespace triad {

namespace {

struct Names {
  std::string_view triad, huggingface;
};

constexpr std::array<Names, 3> kOutside = {{{"embed.weight", "model.embed_tokens.weight"},
                                            {"norm_f.weight", "model.norm.weight"},
                                            {"lm_head.weight", "lm_head.weight"}}};

constexpr Names kLayer = {"blocks.", "model.layers."};  // what precedes the layer's number
// The names in a layer, after its number. Dense attention's k and v are named as in NSA's window branch.
constexpr std::array<Names, 14> kInLayer = {{{".norm1.weight", ".input_layernorm.weight"},
                                             {".attn.q_proj.weight", ".self_attn.q_proj.weight"},
                                             {".attn.k_win_proj.weight", ".self_attn.k_proj.weight"},
                                             {".attn.v_win_proj.weight", ".self_attn.v_proj.weight"},
                                             {".attn.q_proj.bias", ".self_attn.q_proj.bias"},
                                             {".attn.k_win_proj.bias", ".self_attn.k_proj.bias"},
                                             {".attn.v_win_proj.bias", ".self_attn.v_proj.bias"},
                                             {".attn.q_norm.weight", ".self_attn.q_norm.weight"},
                                             {".attn.k_win_norm.weight", ".self_attn.k_norm.weight"},
                                             {".attn.out_proj.weight", ".self_attn.o_proj.weight"},
                                             {".norm2.weight", ".post_attention_layernorm.weight"},
                                             {".mlp.gate_proj.weight", ".mlp.gate_proj.weight"},
                                             {".mlp.up_proj.weight", ".mlp.up_proj.weight"},
                                             {".mlp.down_proj.weight", ".mlp.down_proj.weight"}}};
constexpr std::string_view kInverseFrequencies = ".self_attn.rotary_emb.inv_freq";

// Splits PREFIX<number>REST, for a number without leading zeros; nullopt for any other name.
struct LayerName {
  std::string_view number, rest;
};
std::optional<LayerName> split_layer(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  const size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
  if (digits == 0 || (digits > 1 && name[0] == '0')) return std::nullopt;
  return LayerName{name.substr(0, digits), name.substr(digits)};
}

std::optional<std::string> translate(std::string_view name, std::string_view Names::*from,
                                     std::string_view Names::*to) {
  for (const Names& names : kOutside)
    if (names.*from == name) return std::string(names.*to);
  const std::optional<LayerName> in_layer = split_layer(kLayer.*from, name);
  if (!in_layer) return std::nullopt;
  for (const Names& names : kInLayer)
    if (names.*from == in_layer->rest) return std::string(kLayer.*to).append(in_layer->number).append(names.*to);
  return std::nullopt;
}

}  // namespace

std::optional<std::string> huggingface_name(std::string_view triad_name) {
  return translate(triad_name, &Names::triad, &Names::huggingface);
}

std::optional<std::string> triad_name(std::string_view huggingface_name) {
  return translate(huggingface_name, &Names::huggingface, &Names::triad);
}

std::string name_in_triad_class(const std::string& triad_name) {
  return triad_name == "lm_head.weight" ? triad_name : "model." + triad_name;
}

bool is_computed_tensor(std::string_view huggingface_name) {
  const std::optional<LayerName> in_layer = split_layer(kLayer.huggingface, huggingface_name);
  return in_layer && in_layer->rest == kInverseFrequencies;
}

}  // namespace triad
