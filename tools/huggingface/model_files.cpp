#include "tools/huggingface/model_files.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "io/huggingface/tensor_names.h"
#include "train/config/load_config.h"

namespace triad {

namespace {

using enum HuggingFaceClass;

const char* model_type_of(HuggingFaceClass c) {
  switch (c) {
    case llama:
      return "llama";
    case mistral:
      return "mistral";
    case qwen2:
      return "qwen2";
    case qwen3:
      return "qwen3";
    case smollm3:
      return "smollm3";
    case HuggingFaceClass::triad:
      return "triad";
  }
  fail("a model class without a model_type");
}

// Whether layers have a parameter by this name: biases and the norms on q and k are parameters, so the parameter list
// alone says which ones a model has.
bool has_parameter(const ModelConfig& c, const std::string& name) {
  const std::vector<ParamSpec> specs = param_specs(c);
  return std::any_of(specs.begin(), specs.end(), [&](const ParamSpec& p) { return p.name == "blocks.0." + name; });
}
bool has_biases(const ModelConfig& c) { return has_parameter(c, "attn.q_proj.bias"); }
bool has_qk_norm(const ModelConfig& c) { return has_parameter(c, "attn.q_norm.weight"); }

// What transformers' classes can't hold; empty if one can hold the model.
std::string only_in_triad(const ModelConfig& c) {
  std::vector<std::string> found;
  if (c.has_nsa()) {
    std::vector<std::string> kinds;
    if (c.has_lists()) kinds.push_back("NSA");
    if (c.count_layers(AttentionKind::window) > 0) kinds.push_back("window");
    if (c.count_layers(AttentionKind::dense) > 0) kinds.push_back("dense");
    const std::string last = std::exchange(kinds.back(), "");
    kinds.pop_back();
    found.push_back(fmt::format("{}{}{} layers", fmt::join(kinds, ", "), kinds.empty() ? "" : " and ", last));
  }
  if (c.mlp == MlpKind::silu) found.push_back("mlp silu");
  if (c.d_k != c.d_v) found.push_back(fmt::format("d_k {} with d_v {}", c.d_k, c.d_v));
  if (has_biases(c) && has_qk_norm(c)) found.push_back("qkv_bias with qk_norm");
  if (!c.nope_layers.empty() && (has_biases(c) || has_qk_norm(c)))
    found.push_back(fmt::format("nope_layers with {}", has_biases(c) ? "qkv_bias" : "qk_norm"));
  return fmt::format("{}", fmt::join(found, ", "));
}

// The longest text for which the model is made.
int64_t max_positions(const Config& config) {
  const ModelConfig& m = config.model;
  if (m.rope_scaling == RopeScaling::none) return config.train.longest_seq_len();
  const double scaled = static_cast<double>(m.rope_original_len) * m.rope_factor;
  return std::max(config.train.longest_seq_len(), static_cast<int64_t>(std::llround(scaled)));
}

// transformers' rotation parameters, without rope_theta; null for unscaled frequencies.
Json rope_scaling_json(const ModelConfig& m) {
  switch (m.rope_scaling) {
    case RopeScaling::none:
      return m.rope_scale == 1 ? Json() : Json({{"rope_type", "linear"}, {"factor", m.rope_scale}});
    case RopeScaling::llama3:
      return {{"rope_type", "llama3"},
              {"factor", m.rope_factor},
              {"low_freq_factor", m.rope_low_freq},
              {"high_freq_factor", m.rope_high_freq},
              {"original_max_position_embeddings", m.rope_original_len}};
    case RopeScaling::yarn:
      return {{"rope_type", "yarn"},
              {"factor", m.rope_factor},
              {"beta_fast", m.rope_beta_fast},
              {"beta_slow", m.rope_beta_slow},
              {"original_max_position_embeddings", m.rope_original_len}};
  }
  fail("a rope_scaling that transformers lacks");
}

void set_dtype(Json& json, DType dtype) {
  // transformers renamed torch_dtype to dtype; other programs read the old key.
  for (const char* key : {"torch_dtype", "dtype"}) json[key] = dtype == DType::bf16 ? "bfloat16" : "float32";
}

void set_token_ids(Json& json, std::optional<int64_t> bos_eos) {
  if (!bos_eos) return;
  json["bos_token_id"] = *bos_eos;
  json["eos_token_id"] = *bos_eos;
}

// config.json keys that every model_type has.
Json shape_config(const Config& config, std::string_view architecture, std::string_view model_type) {
  const ModelConfig& m = config.model;
  return {{"architectures", {architecture}},
          {"model_type", model_type},
          {"vocab_size", m.vocab_size},
          {"hidden_size", m.dim},
          {"intermediate_size", m.mlp_hidden},
          {"num_hidden_layers", m.n_layers},
          {"num_attention_heads", m.n_heads},
          {"num_key_value_heads", m.n_kv_groups},
          {"head_dim", m.d_k},
          {"max_position_embeddings", max_positions(config)},
          {"initializer_range", m.init_std},
          {"rms_norm_eps", m.norm_eps},
          {"tie_word_embeddings", m.tie_embeddings},
          {"use_cache", true}};
}

// config.json for a transformers class, made from Triad's config alone.
Json dense_config(const Config& config, HuggingFaceClass c) {
  const ModelConfig& m = config.model;
  Json json = shape_config(config, word_of(c), model_type_of(c));
  json["hidden_act"] = "silu";
  json["attention_dropout"] = 0.0;
  // Files on the Hub have rope_theta and rope_scaling; transformers 5 writes both into rope_parameters.
  const Json scaling = rope_scaling_json(m);
  json["rope_theta"] = m.rope_theta;
  json["rope_scaling"] = scaling;
  json["rope_parameters"] = scaling.is_null() ? Json({{"rope_type", "default"}}) : scaling;
  json["rope_parameters"]["rope_theta"] = m.rope_theta;
  if (c == llama || c == smollm3) json["mlp_bias"] = false;
  if (c == llama || c == qwen3 || c == smollm3) json["attention_bias"] = false;
  if (c != llama) json["sliding_window"] = nullptr;
  if (c == qwen2 || c == qwen3) {
    json["use_sliding_window"] = false;
    json["max_window_layers"] = m.n_layers;
  }
  if (c == smollm3) {
    json["pad_token_id"] = nullptr;  // else the class takes 128,004, which a small vocabulary lacks
    json["use_sliding_window"] = false;
    json["no_rope_layers"] = Json::array();
    for (int64_t i = 0; i < m.n_layers; ++i) json["no_rope_layers"].push_back(m.rotates(i) ? 1 : 0);
  }
  return json;
}

// Whether two files describe the same computation.
bool same_model(const HuggingFaceConfig& a, const HuggingFaceConfig& b) {
  const auto facts = [](const HuggingFaceConfig& c) {
    const HuggingFaceRope& r = c.rope;
    return std::tuple(
        std::tuple(c.model_class, c.dim, c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.mlp_hidden),
        std::tuple(c.vocab_size, c.norm_eps, c.tie_embeddings, c.qkv_bias, c.qk_norm, c.nope_layers),
        std::tuple(r.type, r.theta, r.factor, r.original_len, r.low_freq, r.high_freq, r.beta_fast, r.beta_slow));
  };
  return facts(a) == facts(b);
}

// The imported config.json, with `fresh`'s keys where the model has changed since.
Json updated_config(const Json& imported, const Json& fresh, int64_t seq_len) {
  const HuggingFaceConfig wanted = parse_huggingface_config(fresh, "the exported config.json");
  const HuggingFaceConfig before = parse_huggingface_config(imported, "origin.config in state.json");
  Json json = imported;
  json["architectures"] = fresh["architectures"];
  if (before.max_positions < seq_len) json["max_position_embeddings"] = seq_len;
  if (same_model(parse_huggingface_config(json, "the exported config.json"), wanted)) return json;
  for (const auto& [key, value] : fresh.items())
    if (key != "pad_token_id" || !json.contains(key)) json[key] = value;
  json["max_position_embeddings"] = std::max(before.max_positions, wanted.max_positions);
  const bool same = same_model(parse_huggingface_config(json, "the exported config.json"), wanted);
  TRIAD_CHECK(same, "origin.config in state.json: {}: a key in it changes the exported model", brief(imported));
  return json;
}

// config.json for model_type triad (configuration_triad.py).
Json triad_config(const Config& config) {
  const ModelConfig& m = config.model;
  Json dense_layers = Json::array(), nope_layers = Json::array();
  for (int64_t i = 0; i < m.n_layers; ++i) {
    if (m.attention_of(i) == AttentionKind::dense) dense_layers.push_back(i);
    if (!m.rotates(i)) nope_layers.push_back(i);
  }
  Json json = shape_config(config, word_of(HuggingFaceClass::triad), model_type_of(HuggingFaceClass::triad));
  json["auto_map"] = {{"AutoConfig", "configuration_triad.TriadConfig"},
                      {"AutoModel", "modeling_triad.TriadModel"},
                      {"AutoModelForCausalLM", "modeling_triad.TriadForCausalLM"}};
  json["v_head_dim"] = m.d_v;
  json["mlp"] = word_of(m.mlp);
  json["qkv_bias"] = has_biases(m);
  json["qk_norm"] = has_qk_norm(m);
  json["dense_layers"] = dense_layers;
  json["nope_layers"] = nope_layers;
  json["rope"] = {{"theta", m.rope_theta},
                  {"scale", m.rope_scale},
                  {"scaling", word_of(m.rope_scaling)},
                  {"factor", m.rope_factor},
                  {"original_len", m.rope_original_len},
                  {"low_freq", m.rope_low_freq},
                  {"high_freq", m.rope_high_freq},
                  {"beta_fast", m.rope_beta_fast},
                  {"beta_slow", m.rope_beta_slow}};
  if (m.has_nsa()) json["nsa"] = config_to_json(config)["nsa"];
  return json;
}

}  // namespace

std::string ExportClass::word() const { return std::string(word_of(huggingface.value_or(HuggingFaceClass::triad))); }

ExportClass export_class(const ModelConfig& c, const Json& origin) {
  const std::string reason = only_in_triad(c);
  if (!reason.empty()) return {std::nullopt, reason};
  if (!c.nope_layers.empty()) return {smollm3, ""};
  if (has_biases(c)) return {qwen2, ""};
  if (has_qk_norm(c)) return {qwen3, ""};
  for (const HuggingFaceClass came : {mistral, smollm3})
    if (!origin.is_null() && origin.value("architecture", "") == word_of(came)) return {came, ""};
  return {llama, ""};
}

bool computes_as_imported(const ModelSource& source, const ExportClass& c) {
  if (source.origin.is_null() || !source.origin.contains("config")) return true;
  return same_model(parse_huggingface_config(source.origin["config"], "origin.config in state.json"),
                    parse_huggingface_config(dense_config(source.config, *c.huggingface), "the exported config.json"));
}

std::string exported_name(const ExportClass& c, const std::string& triad_name) {
  if (!c.huggingface) return name_in_triad_class(triad_name);
  const std::optional<std::string> name = huggingface_name(triad_name);
  TRIAD_CHECK(name.has_value(), "{} has no tensor for {}", c.word(), triad_name);
  return *name;
}

Json export_config(const ModelSource& source, const ExportClass& c, DType dtype, std::optional<int64_t> bos_eos) {
  const bool same_class =
      c.huggingface && !source.origin.is_null() && source.origin.value("architecture", "") == c.word();
  Json json;
  if (same_class) {
    const bool whole = source.origin.contains("config") && source.origin["config"].is_object();
    TRIAD_CHECK(whole, "{}/state.json: origin.config is missing: it is needed to export {}", source.folder, c.word());
    json = updated_config(source.origin["config"], dense_config(source.config, *c.huggingface),
                          source.config.train.longest_seq_len());
    if (!has_imported_tokens(source.origin)) set_token_ids(json, bos_eos);
  } else {
    json = c.huggingface ? dense_config(source.config, *c.huggingface) : triad_config(source.config);
    if (!has_imported_tokens(source.origin)) {
      set_token_ids(json, bos_eos);
    } else {
      const Json before = source.origin.value("config", Json::object());
      for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
        if (before.contains(key)) json[key] = before[key];
    }
  }
  set_dtype(json, dtype);
  return json;
}

Json export_generation_config(const ModelSource& source, std::optional<int64_t> bos_eos) {
  if (!source.origin.is_null() && source.origin.contains("generation_config"))
    return source.origin["generation_config"];
  Json json = {{"_from_model_config", true}};
  set_token_ids(json, bos_eos);
  return json;
}

}  // namespace triad
