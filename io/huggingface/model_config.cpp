#include "io/huggingface/model_config.h"

#include <zlib.h>

#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <set>
#include <system_error>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/file.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

constexpr const char* kConfigFile = "config.json";
constexpr const char* kGenerationFile = "generation_config.json";
// An origin's keys.
constexpr const char *kConfig = "config", *kGeneration = "generation_config", *kEos = "eos_token_id";
constexpr const char *kFiles = "files", *kTokenizer = "tokenizer";

// An object in the file, with the prefix for its keys in messages.
class Object {
 public:
  Object(const std::string& path, const Json& json, std::string prefix = "")
      : path_(path), json_(json), prefix_(std::move(prefix)) {}

  // A key's value; nullptr if it is absent or null, which transformers treats alike.
  const Json* find(const char* key) const {
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  bool has(const char* key) const { return json_.contains(key); }
  std::string name(const char* key) const { return prefix_ + key; }

  [[noreturn]] void refuse(const char* key, const Json& value, const std::string& wanted) const {
    fail("{}: {} is {}: {}", path_, name(key), brief(value), wanted);
  }
  // The next three return `otherwise` if the key is absent or null; without it the key is needed.
  int64_t integer(const char* key, double least, double most, std::optional<int64_t> otherwise = {}) const {
    const Json* value = needed(key, otherwise.has_value());
    if (value == nullptr) return *otherwise;
    const bool whole = value->is_number_integer() && value->get<double>() >= least && value->get<double>() <= most;
    if (!whole) refuse(key, *value, fmt::format("a whole number from {:.0f} to {:.0f} is needed", least, most));
    return value->get<int64_t>();
  }
  double number(const char* key, const Rule& rule, std::optional<double> otherwise = {}) const {
    const Json* value = needed(key, otherwise.has_value());
    if (value == nullptr) return *otherwise;
    const bool good = value->is_number() && std::isfinite(value->get<double>()) && rule.allows(value->get<double>());
    if (!good) refuse(key, *value, rule.str() + " is needed");
    return value->get<double>();
  }
  bool flag(const char* key, bool otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) refuse(key, *value, "true or false is needed");
    return value->get<bool>();
  }
  std::string text(const char* key, const std::string& otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) refuse(key, *value, "a string is needed");
    return value->get<std::string>();
  }
  const std::string& path() const { return path_; }

 private:
  const Json* needed(const char* key, bool optional) const {
    const Json* value = find(key);
    TRIAD_CHECK(value != nullptr || optional, "{}: {} is missing", path_, name(key));
    return value;
  }

  const std::string& path_;
  const Json& json_;
  std::string prefix_;
};

constexpr double kMostPositions = 1e12;  // far above real lengths; exact as double and as int64_t

// The class, from `architectures`, or without it from `model_type`.
HuggingFaceClass read_class(const Object& file) {
  const std::string wanted = "import takes " + all_words<HuggingFaceClass>();
  if (const Json* list = file.find("architectures")) {
    if (!list->is_array() || list->size() != 1 || !(*list)[0].is_string()) file.refuse("architectures", *list, wanted);
    for (const auto& [word, value] : EnumWords<HuggingFaceClass>::words)
      if ((*list)[0].get<std::string>() == word) return value;
    file.refuse("architectures", *list, wanted);
  }
  constexpr std::pair<const char*, HuggingFaceClass> kTypes[] = {
      {"llama", HuggingFaceClass::llama}, {"mistral", HuggingFaceClass::mistral}, {"qwen2", HuggingFaceClass::qwen2},
      {"qwen3", HuggingFaceClass::qwen3}, {"smollm3", HuggingFaceClass::smollm3}, {"triad", HuggingFaceClass::triad}};
  const std::string type = file.text("model_type", "");
  TRIAD_CHECK(!type.empty(), "{}: neither architectures nor model_type says what model this is: {}", file.path(),
              wanted);
  for (const auto& [word, value] : kTypes)
    if (type == word) return value;
  file.refuse("model_type", type, wanted);
}

// Throws an Error for what the class can have and Triad cannot compute.
void refuse_unknown_arithmetic(const Object& file, HuggingFaceClass model_class) {
  using enum HuggingFaceClass;
  if (const Json* quantized = file.find("quantization_config"))
    file.refuse("quantization_config", *quantized, "quantized weights cannot be taken: F32, BF16 or F16 are needed");
  if (model_class == HuggingFaceClass::triad) return;
  if (const Json* map = file.find("auto_map"); map != nullptr && map->contains("AutoModelForCausalLM"))
    file.refuse("auto_map", *map, "a model with code of its own cannot be taken");
  if (const std::string act = file.text("hidden_act", "silu"); act != "silu" && act != "swish")
    file.refuse("hidden_act", act, "silu is needed");
  if ((model_class == llama || model_class == smollm3) && file.flag("mlp_bias", false))
    file.refuse("mlp_bias", true, "biases in the MLP cannot be taken");
  if ((model_class == llama || model_class == qwen3 || model_class == smollm3) && file.flag("attention_bias", false))
    file.refuse("attention_bias", true, "it gives o_proj a bias, too, which cannot be taken");
}

// Throws an Error if a layer attends within a sliding window that is shorter than the model's positions.
void refuse_sliding_windows(const Object& file, const HuggingFaceConfig& c) {
  const std::string wanted = "layers with a sliding window cannot be taken";
  constexpr int64_t kDefaultWindow = 4096, kDefaultFirstLayer = 28;  // transformers' defaults
  const Json* types = file.find("layer_types");
  if (types != nullptr) {
    if (!types->is_array()) file.refuse("layer_types", *types, "a list is needed");
    for (const Json& type : *types)
      if (type != "full_attention")
        file.refuse("layer_types", type, "full_attention is needed in each layer; " + wanted);
  }
  if (c.model_class == HuggingFaceClass::llama) return;
  const bool mistral = c.model_class == HuggingFaceClass::mistral, smollm3 = c.model_class == HuggingFaceClass::smollm3;
  if (!mistral && (types != nullptr || !file.flag("use_sliding_window", false))) return;
  // SmolLM3's windows are in its layers without rotation.
  const bool has_first_layer = !mistral && !smollm3;
  if (has_first_layer && file.integer("max_window_layers", 0, kMostPositions, kDefaultFirstLayer) >= c.n_layers) return;
  if ((file.has("sliding_window") || smollm3) && file.find("sliding_window") == nullptr) return;  // null: no window
  const int64_t window = file.integer("sliding_window", 0, kMostPositions, kDefaultWindow);
  if (window < c.max_positions)
    file.refuse(
        "sliding_window", window,
        fmt::format("null is needed, or a number not below max_position_embeddings = {}; {}", c.max_positions, wanted));
}

// transformers' factor on cos and sin for yarn, if neither attention_factor nor mscale sets another one.
double yarn_scale(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1; }

void refuse_yarn_variants(const Object& rope, double factor) {
  constexpr double kRounding = 1e-6;
  const double usual = yarn_scale(factor, 1);
  const std::string wanted = fmt::format("only the default, {}, can be taken", usual);
  const auto differs = [&](double scale) { return !(std::abs(scale - usual) <= kRounding * usual); };
  if (const Json* given = rope.find("attention_factor")) {
    if (differs(rope.number("attention_factor", {}))) rope.refuse("attention_factor", *given, wanted);
  } else if (rope.find("mscale") != nullptr && rope.find("mscale_all_dim") != nullptr) {
    const double mscale = rope.number("mscale", {}), all = rope.number("mscale_all_dim", {});
    if (mscale != 0 && all != 0 && differs(yarn_scale(factor, mscale) / yarn_scale(factor, all)))
      rope.refuse("mscale", mscale, fmt::format("with mscale_all_dim {} it scales attention; {}", all, wanted));
  }
  if (!rope.flag("truncate", true)) rope.refuse("truncate", false, "true is needed");
}

// The rotation's parameters: `rope_scaling` (the Hub's files, with rope_theta next to it) or `rope_parameters`
// (transformers 5). If a file has both, the first one counts, as in transformers.
HuggingFaceRope read_rope(const Object& file, const Json& json, const HuggingFaceConfig& c) {
  static const Json kNone = Json::object();
  const Json *scaling = file.find("rope_scaling"), *parameters = file.find("rope_parameters");
  const bool old = scaling != nullptr && !scaling->empty();
  const char* const key = old ? "rope_scaling" : "rope_parameters";
  const Json& found = old ? *scaling : parameters != nullptr ? *parameters : kNone;
  if (!found.is_object()) file.refuse(key, found, "an object is needed");
  const Object rope(file.path(), found, std::string(key) + ".");
  for (const char* nested : {"full_attention", "sliding_attention"})
    if (const Json* value = rope.find(nested)) rope.refuse(nested, *value, "one rotation for all layers is needed");
  for (const Object& object : {rope, file})
    if (object.number("partial_rotary_factor", {}, 1) != 1)
      object.refuse("partial_rotary_factor", *object.find("partial_rotary_factor"), "1 is needed");

  HuggingFaceRope r;
  constexpr double kSmolLM3Theta = 2e6;
  if (c.model_class == HuggingFaceClass::smollm3) r.theta = kSmolLM3Theta;
  r.theta = rope.number("rope_theta", above(0), file.number("rope_theta", above(0), r.theta));
  const char* const type_key = rope.find("rope_type") != nullptr ? "rope_type" : "type";
  r.type = rope.text(type_key, r.type);
  if (r.type == "default") return r;
  if (r.type != "linear" && r.type != "llama3" && r.type != "yarn")
    rope.refuse(type_key, r.type, "default, linear, llama3 and yarn can be taken");
  if (r.type == "linear") {
    r.factor = rope.number("factor", above(0));
    return r;
  }
  constexpr const char* kOriginal = "original_max_position_embeddings";
  r.original_len = json.contains(kOriginal) ? file.integer(kOriginal, 1, kMostPositions)
                                            : rope.integer(kOriginal, 1, kMostPositions, c.max_positions);
  if (r.type == "llama3") {
    r.factor = rope.number("factor", at_least(1));
    r.low_freq = rope.number("low_freq_factor", above(0));
    r.high_freq = rope.number("high_freq_factor", above(0));
    if (r.high_freq <= r.low_freq)
      rope.refuse("high_freq_factor", r.high_freq, fmt::format("more than low_freq_factor = {} is needed", r.low_freq));
    return r;
  }
  // transformers allows a null factor, for which it takes the lengths' quotient.
  const double quotient = static_cast<double>(c.max_positions) / static_cast<double>(r.original_len);
  r.factor = rope.has("factor") ? rope.number("factor", at_least(1), quotient) : rope.number("factor", at_least(1));
  TRIAD_CHECK(r.factor >= 1, "{}: {} is null, and max_position_embeddings / {} is {}: 1 or more is needed", rope.path(),
              rope.name("factor"), kOriginal, r.factor);
  const auto beta = [&](const char* beta_key, double usual) {
    const double given = rope.number(beta_key, at_least(0), usual);
    return given == 0 ? usual : given;
  };
  r.beta_fast = beta("beta_fast", r.beta_fast);
  r.beta_slow = beta("beta_slow", r.beta_slow);
  if (r.beta_fast < r.beta_slow)
    rope.refuse("beta_fast", r.beta_fast, fmt::format("at least beta_slow = {} is needed", r.beta_slow));
  refuse_yarn_variants(rope, r.factor);
  return r;
}

// The rotation of TriadForCausalLM: the group `rope`, whose keys configuration_triad.py explains.
HuggingFaceRope read_triad_rope(const Object& file) {
  static const Json kNone = Json::object();
  const Json* const found = file.find("rope");
  if (found != nullptr && !found->is_object()) file.refuse("rope", *found, "an object is needed");
  const Object rope(file.path(), found == nullptr ? kNone : *found, "rope.");
  HuggingFaceRope r;
  r.theta = rope.number("theta", above(0), r.theta);
  r.type = rope.text("scaling", "none");
  if (r.type == "none") {
    r.factor = rope.number("scale", above(0), 1);
    r.type = r.factor == 1 ? "default" : "linear";
    return r;
  }
  if (r.type != "llama3" && r.type != "yarn") rope.refuse("scaling", r.type, "none, llama3 and yarn can be taken");
  r.factor = rope.number("factor", at_least(1), 8);
  r.original_len = rope.integer("original_len", 1, kMostPositions, 8192);
  r.low_freq = rope.number("low_freq", above(0), r.low_freq);
  r.high_freq = rope.number("high_freq", above(0), r.high_freq);
  r.beta_fast = rope.number("beta_fast", above(0), r.beta_fast);
  r.beta_slow = rope.number("beta_slow", above(0), r.beta_slow);
  return r;
}

// A list of layers, in order; empty if the file lacks the key.
std::vector<int64_t> read_layers(const Object& file, const char* key, int64_t n_layers) {
  const Json* const given = file.find(key);
  if (given == nullptr) return {};
  if (!given->is_array()) file.refuse(key, *given, "a list of layers is needed");
  std::set<int64_t> layers;
  for (const Json& layer : *given) {
    const bool exists = layer.is_number_unsigned() && layer.get<uint64_t>() < static_cast<uint64_t>(n_layers);
    if (!exists) file.refuse(key, layer, fmt::format("a layer from 0 to {} is needed", n_layers - 1));
    layers.insert(layer.get<int64_t>());
  }
  return {layers.begin(), layers.end()};
}

// SmolLM3's layers without rotation: those with a 0 in the list, or without a list every so many.
std::vector<int64_t> read_no_rope_layers(const Object& file, int64_t n_layers) {
  constexpr const char* kList = "no_rope_layers";
  constexpr int64_t kInterval = 4;
  const int64_t interval = file.integer("no_rope_layer_interval", 1, kMostPositions, kInterval);
  const Json* const list = file.find(kList);
  if (list != nullptr && (!list->is_array() || static_cast<int64_t>(list->size()) < n_layers))
    file.refuse(kList, *list,
                fmt::format("a list with at least {} of 1 and 0, one for each layer, is needed", n_layers));
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < n_layers; ++i) {
    const Json rotates = list == nullptr ? Json((i + 1) % interval != 0) : (*list)[static_cast<size_t>(i)];
    if (rotates != 0 && rotates != 1 && !rotates.is_boolean())
      file.refuse(kList, rotates, "1, for a layer with rotation, or 0 is needed");
    if (rotates == 0 || rotates == false) layers.push_back(i);
  }
  return layers;
}

// What TriadForCausalLM has and transformers' classes do not.
void read_triad(const Object& file, HuggingFaceConfig& c) {
  constexpr double kMostHeadDim = 256;
  c.v_head_dim = file.integer("v_head_dim", 1, kMostHeadDim, c.head_dim);
  c.mlp = file.text("mlp", "silu");
  c.qkv_bias = file.flag("qkv_bias", false), c.qk_norm = file.flag("qk_norm", false);
  c.rope = read_triad_rope(file);
  if (const Json* nsa = file.find("nsa")) {
    if (!nsa->is_object()) file.refuse("nsa", *nsa, "an object is needed");
    c.nsa = *nsa;
  }
  c.dense_layers = read_layers(file, "dense_layers", c.n_layers);
  c.nope_layers = read_layers(file, "nope_layers", c.n_layers);
  TRIAD_CHECK(!c.nsa.is_null() || static_cast<int64_t>(c.dense_layers.size()) == c.n_layers,
              "{}: nsa is missing, and dense_layers is {}: without nsa all {} layers are needed", file.path(),
              brief(Json(c.dense_layers)), c.n_layers);
}

// What transformers takes where a class's file lacks the key.
struct ClassDefaults {
  int64_t max_positions, n_kv_heads, head_dim;  // 0 heads: n_heads; 0 head_dim: dim / n_heads
};
ClassDefaults defaults_of(HuggingFaceClass model_class) {
  switch (model_class) {
    case HuggingFaceClass::llama:
      return {2048, 0, 0};
    case HuggingFaceClass::mistral:
      return {131072, 8, 0};
    case HuggingFaceClass::qwen2:
      return {32768, 32, 0};
    case HuggingFaceClass::qwen3:
      return {32768, 32, 128};
    case HuggingFaceClass::smollm3:
      return {32768, 4, 0};
    case HuggingFaceClass::triad:  // configuration_triad.py
      return {2048, 2, 32};
  }
  fail("a model class without defaults");
}

void read_shape(const Object& file, HuggingFaceConfig& c) {
  const ClassDefaults defaults = defaults_of(c.model_class);
  constexpr double kMostHeads = 1 << 16, kMostHeadDim = 256;
  c.dim = file.integer("hidden_size", 1, 1 << 20);
  c.n_layers = file.integer("num_hidden_layers", 1, 10000);
  c.n_heads = file.integer("num_attention_heads", 1, kMostHeads);
  const char* const kv = "num_key_value_heads";
  const int64_t absent_kv = file.has(kv) ? 0 : defaults.n_kv_heads;
  c.n_kv_heads = file.integer(kv, 1, kMostHeads, absent_kv == 0 ? c.n_heads : absent_kv);
  if (c.n_heads % c.n_kv_heads != 0)
    file.refuse(kv, c.n_kv_heads, fmt::format("a divisor of num_attention_heads = {} is needed", c.n_heads));
  if (file.find("head_dim") != nullptr || (!file.has("head_dim") && defaults.head_dim > 0)) {
    c.head_dim = file.integer("head_dim", 2, kMostHeadDim, defaults.head_dim);
  } else {
    if (c.dim % c.n_heads != 0)
      file.refuse("hidden_size", c.dim,
                  fmt::format("without head_dim, a multiple of num_attention_heads = {} is needed", c.n_heads));
    c.head_dim = c.dim / c.n_heads;
  }
  if (c.head_dim % 2 != 0 || c.head_dim < 2 || c.head_dim > static_cast<int64_t>(kMostHeadDim))
    fail("{}: head_dim, or hidden_size / num_attention_heads, is {}: an even number from 2 to {:.0f} is needed",
         file.path(), c.head_dim, kMostHeadDim);
  c.mlp_hidden = file.integer("intermediate_size", 1, 1 << 22);
  c.vocab_size = file.integer("vocab_size", 2, 1e8);
  c.max_positions = file.integer("max_position_embeddings", 1, kMostPositions, defaults.max_positions);
}

// The CRC-32 over a tokenizer's files, one after the other, in hexadecimal.
std::string checksum_of(const std::vector<Tokenizer::File>& files) {
  uLong crc = 0;
  for (const Tokenizer::File& file : files)
    crc = crc32_z(crc, reinterpret_cast<const Bytef*>(file.content.data()), file.content.size());
  return fmt::format("{:08x}", crc);
}

// What origin.tokenizer holds for a tokenizer; null for NoTokenizer.
Json identity_of(const Tokenizer& tokenizer) {
  if (!tokenizer.available()) return Json();
  const std::vector<Tokenizer::File> files = tokenizer.files();
  return checksum_of(files.empty() ? std::vector<Tokenizer::File>{{"", byte_tokenizer_json()}} : files);
}

// The same for the tokenizer's files in a folder, which need not be a kind that Triad has.
Json identity_in(const std::string& folder) {
  const fs::path path = find_tokenizer(folder);
  if (path.empty()) return Json();
  std::vector<Tokenizer::File> files = {{"", read_file(path.string())}};
  if (path.filename() == "vocab.json") files.push_back({"", read_file((fs::path(folder) / "merges.txt").string())});
  if (path.filename() == "encoder.json") files.push_back({"", read_file((fs::path(folder) / "vocab.bpe").string())});
  const fs::path separator = fs::path(folder) / kSeparatorFile;
  if (fs::is_regular_file(separator)) files.push_back({"", read_file(separator.string())});
  return checksum_of(files);
}

}  // namespace

HuggingFaceConfig parse_huggingface_config(Json json, const std::string& path) {
  TRIAD_CHECK(json.is_object(), "{}: a JSON object is needed, found {}", path, brief(json));
  HuggingFaceConfig c;
  c.json = std::move(json);
  const Object file(path, c.json);
  c.model_class = read_class(file);
  refuse_unknown_arithmetic(file, c.model_class);
  read_shape(file, c);
  c.norm_eps = file.number("rms_norm_eps", above(0), c.norm_eps);
  c.init_std = file.number("initializer_range", at_least(0), c.init_std);
  c.tie_embeddings = file.flag("tie_word_embeddings", c.model_class == HuggingFaceClass::smollm3);
  c.v_head_dim = c.head_dim;
  if (c.model_class == HuggingFaceClass::triad) {
    read_triad(file, c);
    return c;
  }
  c.qkv_bias = c.model_class == HuggingFaceClass::qwen2;
  c.qk_norm = c.model_class == HuggingFaceClass::qwen3;
  refuse_sliding_windows(file, c);
  c.rope = read_rope(file, c.json, c);
  if (c.model_class == HuggingFaceClass::smollm3) c.nope_layers = read_no_rope_layers(file, c.n_layers);
  return c;
}

HuggingFaceConfig read_huggingface_config(const std::string& folder) {
  const std::string path = (fs::path(folder) / kConfigFile).string();
  return parse_huggingface_config(parse_json(read_file(path), path), path);
}

bool is_huggingface_folder(const std::string& folder) {
  const std::string path = (fs::path(folder) / kConfigFile).string();
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return false;
  try {
    const Json json = parse_json(read_file(path), path, JsonComments::allowed);
    return json.is_object() && (json.contains("architectures") || json.contains("model_type"));
  } catch (const Error&) { return false; }
}

void fail_huggingface_folder(const std::string& folder) {
  fail_usage("{} is a transformers folder: triad import takes it", folder);
}

Json read_origin(const std::string& folder, const HuggingFaceConfig& config, const Tokenizer& tokenizer) {
  const auto is_file = [&](const char* name) {
    std::error_code ignored;
    return fs::is_regular_file(fs::path(folder) / name, ignored);
  };
  const auto text_of = [&](const char* name) {
    const std::string path = (fs::path(folder) / name).string();
    std::string text = read_file(path);
    const size_t valid = utf8_prefix(text);
    TRIAD_CHECK(valid == text.size(), "{}: the byte 0x{:02x} at offset {} is not UTF-8", path,
                static_cast<unsigned char>(text[valid]), valid);
    return text;
  };
  Json origin = {{"format", "transformers"},
                 {"architecture", word_of(config.model_class)},
                 {kConfig, config.json},
                 {kTokenizer, tokenizer.available() ? identity_of(tokenizer) : identity_in(folder)},
                 {kFiles, Json::object()}};
  if (is_file(kGenerationFile)) {
    const std::string path = (fs::path(folder) / kGenerationFile).string();
    origin[kGeneration] = parse_json(text_of(kGenerationFile), path);
    TRIAD_CHECK(origin[kGeneration].is_object(), "{}: a JSON object is needed, found {}", path,
                brief(origin[kGeneration]));
  }
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                           "chat_template.json", "chat_template.jinja"})
    if (is_file(name)) origin[kFiles][name] = text_of(name);
  for (const int64_t token : eos_tokens(origin))
    TRIAD_CHECK(token < config.vocab_size, "{}: {} {} is outside of the vocabulary of {}", folder, kEos, token,
                config.vocab_size);
  return origin;
}

Json origin_for_tokens(Json origin, const Tokenizer& tokenizer, const std::string& name) {
  // An older program's checkpoint does not say which tokenizer was imported.
  if (!origin.is_object() || !origin.contains(kTokenizer) || name == kNoTokenizer) return origin;
  if (origin[kTokenizer] == identity_of(tokenizer)) return origin;
  origin.erase(kFiles);
  origin.erase(kGeneration);
  if (origin.contains(kConfig) && origin[kConfig].is_object())
    for (const char* key : {"bos_token_id", kEos, "pad_token_id"}) origin[kConfig].erase(key);
  return origin;
}

bool has_imported_tokens(const Json& origin) { return origin.is_object() && origin.contains(kFiles); }

std::vector<int64_t> eos_tokens(const Json& origin) {
  if (!origin.is_object()) return {};
  for (const char* part : {kGeneration, kConfig}) {
    if (!origin.contains(part) || !origin[part].is_object() || !origin[part].contains(kEos)) continue;
    const Json& value = origin[part][kEos];
    std::vector<int64_t> tokens;
    for (const Json& token : value.is_null() ? Json::array() : value.is_array() ? value : Json::array({value})) {
      TRIAD_CHECK(token.is_number_unsigned() && token.get<uint64_t>() < (uint64_t{1} << 31),
                  "{}.json: {} is {}: a token's number or a list of them is needed", part, kEos, brief(value));
      tokens.push_back(token.get<int64_t>());
    }
    return tokens;
  }
  return {};
}

}  // namespace triad
