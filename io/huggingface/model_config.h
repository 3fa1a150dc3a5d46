// Reads config.json in a model folder that Hugging Face's transformers has written: the classes whose arithmetic Triad
// has. What Triad cannot compute is an Error that names the file, the key and the value. The struct has no model/
// types; tools/import.cpp maps it to a Config.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/fields.h"
#include "io/json_config.h"
#include "io/tokenizer/tokenizer.h"

namespace triad {

// The classes that `triad import` takes: transformers' own, and the one in modeling_triad.py, with which `triad export`
// writes the models that transformers has no class for.
enum class HuggingFaceClass { llama, mistral, qwen2, qwen3, smollm3, triad };
template <>
struct EnumWords<HuggingFaceClass> {
  static constexpr std::pair<std::string_view, HuggingFaceClass> words[] = {
      {"LlamaForCausalLM", HuggingFaceClass::llama},     {"MistralForCausalLM", HuggingFaceClass::mistral},
      {"Qwen2ForCausalLM", HuggingFaceClass::qwen2},     {"Qwen3ForCausalLM", HuggingFaceClass::qwen3},
      {"SmolLM3ForCausalLM", HuggingFaceClass::smollm3}, {"TriadForCausalLM", HuggingFaceClass::triad}};
};

// How queries and keys are rotated. `type` is transformers' rope_type: default, linear, llama3 or yarn. The fields
// after theta are used by the types that their comments name.
struct HuggingFaceRope {
  std::string type = "default";
  double theta = 10000;
  double factor = 1;                     // linear, llama3, yarn
  int64_t original_len = 0;              // llama3, yarn: original_max_position_embeddings
  double low_freq = 1, high_freq = 4;    // llama3
  double beta_fast = 32, beta_slow = 1;  // yarn
};

struct HuggingFaceConfig {
  HuggingFaceClass model_class = HuggingFaceClass::llama;
  int64_t dim = 0, n_layers = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, mlp_hidden = 0, vocab_size = 0;
  int64_t max_positions = 0;
  double norm_eps = 1e-6, init_std = 0.02;
  bool tie_embeddings = false;
  bool qkv_bias = false;  // q_proj, k_proj and v_proj have biases (Qwen2)
  bool qk_norm = false;   // RMSNorm on every q and k head (Qwen3)
  HuggingFaceRope rope;
  int64_t v_head_dim = 0;             // width of a value head; other than head_dim in TriadForCausalLM alone
  std::string mlp = "swiglu";         // a word of the config key model.mlp
  std::vector<int64_t> dense_layers;  // TriadForCausalLM with `nsa`: the layers with dense attention
  std::vector<int64_t> nope_layers;   // SmolLM3 and TriadForCausalLM: the layers without rotation
  Json nsa;                           // TriadForCausalLM: the config's group nsa, unchecked; null: attention is dense
  Json json;                          // the whole file, which an export keeps
};

// Reads and checks folder/config.json.
HuggingFaceConfig read_huggingface_config(const std::string& folder);
// Checks a config.json's JSON; `path` is its name in messages.
HuggingFaceConfig parse_huggingface_config(Json json, const std::string& path);

// Whether the folder has a config.json with a key `architectures` or `model_type`, which Triad's own configs do not
// have. False too if the file cannot be read as JSON.
bool is_huggingface_folder(const std::string& folder);
// Refuses such a folder where a Triad checkpoint or config is needed, and says how to get one.
[[noreturn]] void fail_huggingface_folder(const std::string& folder);

// What an export needs from the folder that was imported, as state.json keeps it under `origin` (README.md here): the
// class, config.json, generation_config.json, which tokenizer the folder has, and the texts in the tokenizer's small
// files, which must be UTF-8. tokenizer: the imported one; if it is NoTokenizer, the folder may hold one all the same.
Json read_origin(const std::string& folder, const HuggingFaceConfig&, const Tokenizer& tokenizer);

// The origin as far as it holds for a model whose tokens are `tokenizer`'s, named `name` in its config (data.tokenizer;
// "none" says that the tokens are still the imported ones). If it is not the imported tokenizer, the result lacks
// generation_config, the small files, and config's ids for bos, eos and pad, because the model's tokens mean something
// else now. A null origin stays null.
Json origin_for_tokens(Json origin, const Tokenizer& tokenizer, const std::string& name);
// Whether origin_for_tokens's result belongs to a model with the imported tokens.
bool has_imported_tokens(const Json& origin);

// The tokens that end an imported model's generation: eos_token_id in the origin's generation_config, or if that has
// none, in its config. The value is a number, a list of numbers, or null (none). Throws an Error with key and value for
// anything else. An origin that is null has none.
std::vector<int64_t> eos_tokens(const Json& origin);

}  // namespace triad
