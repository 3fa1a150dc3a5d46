// Fuzzes reading a transformers folder's JSON files: config.json (io/huggingface/model_config.h) and
// model.safetensors.index.json (io/weight_index.h).
#include <cmath>

#include "io/huggingface/model_config.h"
#include "io/weight_index.h"
#include "tests/fuzz/contract.h"

namespace triad::fuzz {

namespace {

// Checks that what is accepted is a model that can exist, and that its JSON reads the same again.
void check_config(const HuggingFaceConfig& c, const std::string& path) {
  for (const int64_t size : {c.dim, c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.mlp_hidden, c.vocab_size})
    expect(size >= 1 && size <= 100'000'000, "{}: a size of {}", path, size);
  expect(c.n_heads % c.n_kv_heads == 0, "{}: {} heads of {} groups", path, c.n_heads, c.n_kv_heads);
  expect(c.head_dim % 2 == 0, "{}: heads of {}", path, c.head_dim);
  expect(c.max_positions >= 1, "{}: {} positions", path, c.max_positions);
  const HuggingFaceRope& r = c.rope;
  for (const double x : {c.norm_eps, r.theta, r.factor, r.low_freq, r.high_freq, r.beta_fast, r.beta_slow})
    expect(std::isfinite(x) && x > 0, "{}: the value {}", path, x);
  expect(c.init_std >= 0 && std::isfinite(c.init_std), "{}: init_std {}", path, c.init_std);
  const bool scaled = r.type == "llama3" || r.type == "yarn";
  expect(scaled || r.type == "linear" || r.type == "default", "{}: rope {}", path, r.type);
  expect(!scaled || r.original_len >= 1, "{}: rope of {} positions", path, r.original_len);
  const HuggingFaceConfig again = parse_huggingface_config(parse_json(dump_json(c.json, 2), "printed"), "printed");
  expect(again.json == c.json && again.head_dim == c.head_dim && again.rope.type == r.type &&
             again.rope.factor == r.factor,
         "{}: printed and read again, it is another model", path);
  const std::optional<std::vector<int64_t>> ends = read_or_refuse("config.json", [&] {
    return eos_tokens({{"config", c.json}});
  });
  if (ends)
    for (const int64_t token : *ends) expect(token >= 0, "{}: end of text {}", path, token);
}

}  // namespace

void read_huggingface(std::string_view bytes) {
  const std::vector<std::string_view> parts = sections(bytes, 2);
  const std::string path = scratch_file("config.json", parts[0]);
  const bool looks_like = is_huggingface_folder(scratch_folder());
  const std::optional<HuggingFaceConfig> config =
      read_or_refuse(path, [] { return read_huggingface_config(scratch_folder()); });
  if (config) {
    expect(looks_like, "{}: read, but is_huggingface_folder() is false", path);
    check_config(*config, path);
  }
  const std::string index = scratch_file("model.safetensors.index.json", parts[1]);
  const auto map = read_or_refuse(index, [&] { return read_weight_map(index); });
  if (!map) return;
  expect(!map->empty(), "{}: an index without tensors", index);
  for (const auto& [tensor, file] : *map)
    expect(!file.empty() && file.find('/') == std::string::npos && file != "..", "{}: the file {}", index, file);
}

}  // namespace triad::fuzz
