#include "tools/import_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/huggingface/tensor_names.h"
#include "model/params.h"
#include "train/config/load_config.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

Json nsa_group(Branches branches) {
  // MSA's blocks, as in configs/m7c_125m_msa.json.
  if (branches == Branches::selected) return {{"l_sel", 128}, {"n_sel", 16}, {"init_blocks", 0}, {"local_blocks", 1}};
  if (branches == Branches::window) return {{"w", 512}};
  // The window branch begins with most of the weight, because it alone has the dense model's keys without choosing or
  // averaging them; equal gates would begin with a worse model.
  return {
      {"l", 32}, {"d", 16}, {"l_sel", 64}, {"n_sel", 16}, {"w", 512}, {"phi", "avg"}, {"gate_init", {0.1, 0.3, 0.6}}};
}

AttentionKind attention_in(const HuggingFaceConfig& c) {
  return c.nsa.is_null() ? AttentionKind::dense : AttentionKind::nsa;
}

// Layers as the keys model.dense_layers and nope_layers have them: "0:2,5:6" for 0, 1 and 5.
std::string ranges_of(const std::vector<int64_t>& layers) {
  std::string ranges;
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool begins = i == 0 || layers[i] != layers[i - 1] + 1;
    if (begins) ranges += fmt::format("{}{}:", ranges.empty() ? "" : ",", layers[i]);
    if (i + 1 == layers.size() || layers[i + 1] != layers[i] + 1) ranges += fmt::format("{}", layers[i] + 1);
  }
  return ranges;
}

// The groups model and nsa.
Json model_groups(const HuggingFaceConfig& c, AttentionKind attention) {
  Json model = {{"dim", c.dim},
                {"n_layers", c.n_layers},
                {"n_heads", c.n_heads},
                {"n_kv_groups", c.n_kv_heads},
                {"d_k", c.head_dim},
                {"d_v", c.v_head_dim},
                {"vocab_size", c.vocab_size},
                {"mlp", c.mlp},
                {"mlp_hidden", c.mlp_hidden},
                {"attention", word_of(attention)},
                {"tie_embeddings", c.tie_embeddings},
                {"rope_theta", c.rope.theta},
                {"norm_eps", c.norm_eps}};
  if (c.init_std > 0) model["init_std"] = c.init_std;
  if (c.qkv_bias) model["qkv_bias"] = true;
  if (c.qk_norm) model["qk_norm"] = true;
  if (c.rope.type == "linear") model["rope_scale"] = c.rope.factor;
  if (c.rope.type == "llama3" || c.rope.type == "yarn") {
    model["rope_scaling"] = c.rope.type;
    model["rope_factor"] = c.rope.factor;
    model["rope_original_len"] = c.rope.original_len;
  }
  if (c.rope.type == "llama3") {
    model["rope_low_freq"] = c.rope.low_freq;
    model["rope_high_freq"] = c.rope.high_freq;
  }
  if (c.rope.type == "yarn") {
    model["rope_beta_fast"] = c.rope.beta_fast;
    model["rope_beta_slow"] = c.rope.beta_slow;
  }
  if (!c.nsa.is_null()) model["dense_layers"] = ranges_of(c.dense_layers);
  if (!c.nope_layers.empty()) model["nope_layers"] = ranges_of(c.nope_layers);
  return {{"model", std::move(model)}, {"nsa", c.nsa.is_null() ? nsa_group(Branches::all) : c.nsa}};
}

// Adds a run's groups. Synthetic tokens, so that the config trains as it is; the user sets data.* and train.*.
Json with_run_groups(Json root, const ImportSource& source, const std::string& out) {
  constexpr int64_t kMostSeqLen = 4096;
  const std::vector<Tokenizer::File> files = source.tokenizer->files();  // none for `byte` and `none`
  root["data"] = {{"kind", "synthetic"},
                  {"tokenizer", files.empty() ? source.tokenizer->name() : out + "/" + files.front().name}};
  root["train"] = {{"steps", 1000},         {"seq_len", std::min(kMostSeqLen, source.config.max_positions)},
                   {"micro_batch_size", 1}, {"lr", 1e-5},
                   {"warmup_steps", 50},    {"init_from", out}};
  root["runtime"] = {{"precision", source.is_16_bit() ? "bf16" : "fp32"}};
  root["log"] = {{"out_dir", "runs/" + fs::path(out).filename().string() + "_run"}};
  return root;
}

// The config for groups model and nsa alone: the groups that a run needs get any values.
Config config_of_groups(Json root) {
  root["data"] = {{"kind", "synthetic"}};
  root["train"] = {{"steps", 1}, {"seq_len", 1}, {"micro_batch_size", 1}};
  root["log"] = {{"out_dir", "runs"}};
  return config_from_json(root);
}

void check_entry(const SafetensorsFile& file, const TensorEntry& entry, const ParamSpec& spec,
                 const std::string& architecture) {
  const std::vector<int64_t> shape(spec.shape.dim.begin(), spec.shape.dim.begin() + spec.shape.rank);
  TRIAD_CHECK(entry.shape == shape, "{}: tensor {} is {}, but {} of this config.json has {}", file.path(),
              shortened(entry.name), shortened(entry.str()), architecture, spec.shape.str());
  TRIAD_CHECK(entry.dtype == "F32" || entry.dtype == "BF16" || entry.dtype == "F16",
              "{}: tensor {} is {}: F32, BF16 or F16 is needed", file.path(), shortened(entry.name),
              shortened(entry.str()));
}

std::string name_in(HuggingFaceClass model_class, const std::string& triad_name) {
  if (model_class == HuggingFaceClass::triad) return name_in_triad_class(triad_name);
  const std::optional<std::string> name = huggingface_name(triad_name);
  TRIAD_CHECK(name.has_value(), "{}: transformers has no name for {}", word_of(model_class), triad_name);
  return *name;
}

// Throws an Error unless the folder has exactly the model's tensors.
void check_tensors(const WeightIndex& weights, const HuggingFaceConfig& config, const std::string& folder) {
  const std::string architecture(word_of(config.model_class));
  std::map<std::string, const ParamSpec*, std::less<>> expected;
  std::vector<ParamSpec> specs;
  try {
    specs = param_specs(model_in_folder(config));
  } catch (const UsageError& e) { fail("{}/config.json: {}", folder, e.what()); }
  for (const ParamSpec& spec : specs) expected.emplace(name_in(config.model_class, spec.name), &spec);
  weights.for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
    if (const auto at = expected.find(entry.name); at != expected.end())
      return check_entry(file, entry, *at->second, architecture);
    if (is_computed_tensor(entry.name)) return;
    // Some files hold a tied head, too; import compares it with the embedding.
    if (config.tie_embeddings && entry.name == "lm_head.weight")
      return check_entry(file, entry, specs.front(), architecture);
    fail("{}: tensor {} {} is none of a {} with this config.json", file.path(), shortened(entry.name),
         shortened(entry.str()), architecture);
  });
  for (const auto& [name, spec] : expected)
    TRIAD_CHECK(weights.find(name) != nullptr, "{}: tensor {} {} is missing from the {} of {}", folder, name,
                spec->shape.str(), weights.count(),
                weights.files().size() == 1 ? "file" : fmt::format("{} files", weights.files().size()));
}

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& folder, int64_t vocab) {
  const std::string path = find_tokenizer(folder);
  if (path.empty()) return std::make_unique<NoTokenizer>();
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    tokenizer = make_tokenizer(path);
  } catch (const Error& e) { fail("{} (--no-tokenizer imports the weights without it)", e.what()); }
  TRIAD_CHECK(tokenizer->vocab_size() <= vocab,
              "{}: the tokenizer has {} tokens, but vocab_size in config.json is {} (--no-tokenizer imports the "
              "weights without it)",
              path, tokenizer->vocab_size(), vocab);
  return tokenizer;
}

}  // namespace

std::string ImportSource::dtypes() const {
  std::set<std::string> words;
  weights.for_each([&](const SafetensorsFile&, const TensorEntry& entry) { words.insert(entry.dtype); });
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : ", ") + word;
  return out;
}

bool ImportSource::is_16_bit() const { return dtypes().find("16") != std::string::npos; }

std::string ImportSource::tensor_name(const std::string& triad_name) const {
  return name_in(config.model_class, triad_name);
}

ModelConfig model_in_folder(const HuggingFaceConfig& config) {
  return config_of_groups(model_groups(config, attention_in(config))).model;
}

ImportSource open_import(const std::string& folder, bool with_tokenizer) {
  std::error_code ignored;
  TRIAD_CHECK(fs::is_directory(folder, ignored), "{}: there is no such folder", folder);
  refuse_adapter(folder);
  HuggingFaceConfig config = read_huggingface_config(folder);
  WeightIndex weights(folder);
  check_tensors(weights, config, folder);
  std::unique_ptr<Tokenizer> tokenizer =
      with_tokenizer ? open_tokenizer(folder, config.vocab_size) : std::make_unique<NoTokenizer>();
  Json origin = read_origin(folder, config, *tokenizer);
  return {folder, std::move(config), std::move(weights), std::move(tokenizer), std::move(origin)};
}

Config config_of_import(const ImportSource& source, const ImportedConfig& o) {
  const bool has_nsa = !source.config.nsa.is_null();
  const AttentionKind attention = o.attention.value_or(attention_in(source.config));
  if (has_nsa && attention == AttentionKind::dense)
    fail_usage("--attention dense: the model in {} has NSA", source.folder);
  const Json unset = with_run_groups(model_groups(source.config, attention), source, o.out);
  Config before = config_from_json(unset);
  const auto with_sets = [&](Json root) {
    for (const std::string& assignment : o.sets) set_json_key(root, assignment);
    return root;
  };
  Json root = with_sets(unset);
  for (const Branches one_softmax : {Branches::selected, Branches::window})
    if (!has_nsa && root["nsa"].value("branches", Json()) == word_of(one_softmax)) {
      root = unset;
      root["nsa"] = nsa_group(one_softmax);
      root = with_sets(std::move(root));
      break;
    }
  Config config = config_from_json(root);
  const Json was = group_to_json(before.model), now = group_to_json(config.model);
  for (const auto& [key, value] : was.items()) {
    if (key == "init_std" || (key == "dense_layers" && !has_nsa) || now[key] == value) continue;
    if (key == "attention") fail_usage("--set model.attention: use --attention {}", now[key].get<std::string>());
    fail_usage("--set model.{} is {}: the model in {} has {}", key, brief(now[key]), source.folder, brief(value));
  }
  if (!has_nsa) return config;
  const Json nsa_was = config_to_json(before)["nsa"], nsa_now = config_to_json(config)["nsa"];
  for (const auto& [key, value] : nsa_was.items())
    if (key != "index_loss" && nsa_now.value(key, Json()) != value)
      fail_usage("--set nsa.{} is {}: the model in {} has {}", key, brief(nsa_now.value(key, Json())), source.folder,
                 brief(value));
  return config;
}

}  // namespace triad
