#include "tests/support/huggingface_folder.h"

#include <bit>
#include <cstring>
#include <filesystem>

#include "engine/dtype.h"
#include "engine/rng.h"
#include "io/file.h"
#include "tests/support/program.h"

namespace triad::test {

namespace {

std::string bytes_of(const FolderTensor& tensor) {
  std::string out;
  const auto put = [&](auto value) { out.append(reinterpret_cast<const char*>(&value), sizeof value); };
  for (const float value : tensor.values) {
    if (tensor.dtype == "BF16")
      put(static_cast<bf16>(value));
    else if (tensor.dtype == "F16")
      put(static_cast<_Float16>(value));
    else
      put(value);
  }
  return out;
}

// Writes a safetensors file; written here by hand, because io/'s writer knows no F16.
void write_tensors(const std::string& path, const std::map<std::string, FolderTensor>& tensors) {
  Json header = {{"__metadata__", {{"format", "pt"}}}};
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = data.size();
    data += bytes_of(tensor);
    header[name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  std::string json = header.dump();
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const uint64_t length = json.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  write_text(path, file + json + data);
}

}  // namespace

void HuggingFaceFolder::write(const std::string& folder, size_t files) const {
  std::filesystem::create_directories(folder);
  write_text(folder + "/config.json", config.dump(2));
  if (files == 1) return write_tensors(folder + "/model.safetensors", tensors);
  std::vector<std::map<std::string, FolderTensor>> parts(files);
  Json map = Json::object();
  size_t number = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t part = number++ * files / tensors.size();
    parts[part][name] = tensor;
    map[name] = fmt::format("model-{:05}-of-{:05}.safetensors", part + 1, files);
  }
  for (size_t part = 0; part < files; ++part)
    write_tensors(fmt::format("{}/model-{:05}-of-{:05}.safetensors", folder, part + 1, files), parts[part]);
  const Json root = {{"metadata", {{"total_size", 1}}}, {"weight_map", map}};
  if (index) write_text(folder + "/model.safetensors.index.json", root.dump(2));
}

void HuggingFaceFolder::set_dtype(const std::string& dtype) {
  for (auto& [name, tensor] : tensors) tensor.dtype = dtype;
}

void HuggingFaceFolder::set_vocabulary(int64_t tokens) {
  config["vocab_size"] = tokens;
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"}) {
    FolderTensor& tensor = tensors[name];
    const size_t before = tensor.values.size();
    tensor.shape[0] = tokens;
    for (size_t i = 0; tensor.values.size() < static_cast<size_t>(tokens * tensor.shape[1]); ++i)
      tensor.values.push_back(tensor.values[i % before]);
  }
}

HuggingFaceFolder tiny_llama() {
  constexpr int64_t kDim = 32, kLayers = 2, kHeads = 4, kGroups = 2, kHead = 8, kMlp = 48, kVocab = 64;
  HuggingFaceFolder f;
  f.config = {{"architectures", {"LlamaForCausalLM"}},
              {"model_type", "llama"},
              {"hidden_size", kDim},
              {"num_hidden_layers", kLayers},
              {"num_attention_heads", kHeads},
              {"num_key_value_heads", kGroups},
              {"intermediate_size", kMlp},
              {"vocab_size", kVocab},
              {"max_position_embeddings", 128},
              {"rms_norm_eps", 1e-5},
              {"eos_token_id", nullptr},
              {"torch_dtype", "float32"}};
  uint64_t stream = 0;
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape, float center = 0) {
    FolderTensor& tensor = f.tensors[name];
    tensor.shape = shape;
    int64_t n = 1;
    for (const int64_t axis : shape) n *= axis;
    const Philox random(1, ++stream);
    for (int64_t i = 0; i < n; ++i) {
      const auto step = static_cast<int>(random.uniform(static_cast<uint64_t>(i)) * 128) - 64;
      tensor.values.push_back(center + static_cast<float>(step) / 256);
    }
  };
  add("model.embed_tokens.weight", {kVocab, kDim});
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    add(layer + "input_layernorm.weight", {kDim}, 0.5f);
    add(layer + "self_attn.q_proj.weight", {kHeads * kHead, kDim});
    add(layer + "self_attn.k_proj.weight", {kGroups * kHead, kDim});
    add(layer + "self_attn.v_proj.weight", {kGroups * kHead, kDim});
    add(layer + "self_attn.o_proj.weight", {kDim, kHeads * kHead});
    add(layer + "post_attention_layernorm.weight", {kDim}, 0.5f);
    add(layer + "mlp.gate_proj.weight", {kMlp, kDim});
    add(layer + "mlp.up_proj.weight", {kMlp, kDim});
    add(layer + "mlp.down_proj.weight", {kDim, kMlp});
  }
  add("model.norm.weight", {kDim}, 0.5f);
  add("lm_head.weight", {kVocab, kDim});
  return f;
}

std::string bpe_tokenizer_json() {
  const std::string path = TRIAD_SOURCE_DIR "/tests/io/known_tokens.json";
  return parse_json(read_file(path), path)[0]["tokenizer"].dump();
}

}  // namespace triad::test
