#include "train/state.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <set>
#include <utility>

#include "engine/check.h"
#include "io/checkpoint.h"
#include "io/data/dataset.h"
#include "io/file.h"
#include "io/safetensors.h"
#include "io/tokenizer/unicode.h"
#include "kernels/ops/cast.h"
#include "model/from_dense.h"
#include "train/load_config.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kOrigin = "origin";  // keys of state.json
constexpr const char* kData = "data";

// A host buffer [stored elements] laid out as the flat parameter buffer; its tensors are written as prefix + name.
struct NamedBuffer {
  std::string prefix;
  Tensor whole;  // f32 or bf16: the dtype of the file's tensors
};

void write_buffers(const Params& params, const std::vector<NamedBuffer>& buffers, const std::string& path) {
  std::vector<TensorSpec> specs;
  for (const NamedBuffer& b : buffers)
    for (const ParamSpec& p : params.specs()) specs.push_back({b.prefix + p.name, b.whole.dtype, p.shape});
  SafetensorsWriter file(path, specs);
  for (const NamedBuffer& b : buffers)
    for (int64_t i = 0; i < params.count(); ++i) {
      const Tensor part = params.part(b.whole, i);
      file.write(b.prefix + params.specs()[i].name, {part.data, static_cast<size_t>(part.bytes())});
    }
  file.finish();
}

// Reads an entry of any float dtype as float.
void read_entry(const SafetensorsFile& file, const TensorEntry& entry, float* out) {
  const int64_t n = entry.numel();
  const auto whole = [&]<class T>(T* to) {
    file.read(entry, std::as_writable_bytes(std::span(to, static_cast<size_t>(n))));
  };
  auto convert = [&]<class T>() {
    std::vector<T> values(static_cast<size_t>(n));
    whole(values.data());
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(values[static_cast<size_t>(i)]);
  };
  const std::optional<DType> dtype = entry.engine_dtype();
  if (dtype == DType::f32) return whole(out);
  if (dtype == DType::f64) return convert.template operator()<double>();
  if (dtype == DType::bf16) return convert.template operator()<bf16>();
  if (entry.dtype == "F16") return convert.template operator()<_Float16>();
  fail("{}: tensor {} is {}: F32, BF16, F16 or F64 is needed", file.path(), shortened(entry.name), entry.str());
}

// The name of the tensor of a file from which a parameter is read; empty if it keeps its initial values.
using NameOf = std::function<std::string(const ParamSpec&)>;
NameOf with_prefix(const std::string& prefix) {
  return [prefix](const ParamSpec& spec) { return prefix + spec.name; };
}

// Reads the tensors of a file into a host buffer [stored elements] laid out as the flat parameter buffer.
void read_into(std::vector<float>& host, const Params& params, const SafetensorsFile& file, const NameOf& name_of) {
  for (int64_t i = 0; i < params.count(); ++i) {
    const ParamSpec& spec = params.specs()[i];
    const std::string name = name_of(spec);
    if (name.empty()) continue;
    const TensorEntry& entry = file.at(name);
    const std::vector<int64_t> shape(spec.shape.dim.begin(), spec.shape.dim.begin() + spec.shape.rank);
    TRIAD_CHECK(entry.shape == shape, "{}: tensor {} is {}, but the model's{} is {}", file.path(), entry.name,
                entry.str(), name.ends_with(spec.name) ? "" : " " + spec.name, spec.shape.str());
    read_entry(file, entry, host.data() + params.offset(i));
  }
}

// Reads the tensors prefix + name; padding is 0.
std::vector<float> read_buffer(const Params& params, const SafetensorsFile& file, const std::string& prefix) {
  std::vector<float> host(static_cast<size_t>(params.stored_elements()), 0.0f);
  read_into(host, params, file, with_prefix(prefix));
  return host;
}

void check_names(const Params& params, const SafetensorsFile& file, const std::vector<NameOf>& names) {
  std::set<std::string> expected;
  for (const NameOf& name_of : names)
    for (const ParamSpec& p : params.specs()) expected.insert(name_of(p));
  for (const TensorEntry& entry : file.entries())
    TRIAD_CHECK(expected.contains(entry.name), "{}: tensor {} is none of this model's", file.path(),
                shortened(entry.name));
}

// Calls report(key, their value, our value) for each key in which two configs differ.
template <class F>
void for_each_difference(const Config& theirs, const Config& ours, F&& report) {
  const Json a = config_to_json(theirs), b = config_to_json(ours);
  for (const auto& [group, fields] : a.items()) {
    if (!ours.model.has_nsa() && group == "nsa") continue;
    for (const auto& [key, value] : fields.items())
      if (b[group][key] != value) report(group + "." + key, brief(value), brief(b[group][key]));
  }
}

// Keys that a resume must not change: the weights fit no other model, and the data cursor no other data.
bool decides_resume(const std::string& key) {
  if (key == "data.stall_s") return false;
  return key.starts_with("model.") || key.starts_with("nsa.") || key.starts_with("data.") || key == "train.seq_len";
}

// Whether data.tokenizer may change: the data are shards, whose tokens stay the same, and the old config did not name
// their tokenizer (its value was "byte" or empty).
bool names_unknown_tokenizer(const Config& before, const Config& now) {
  return now.data.kind == DataKind::shards && before.data.tokenizer_or_bytes() == "byte";
}

Json read_state(const std::string& folder) {
  const std::string path = folder + "/" + kStateFile;
  const Json state = parse_json(read_file(path), path);
  TRIAD_CHECK(state.is_object() && state.contains("config") && state["config"].is_object(),
              "{}: a JSON object with `config` is needed", path);
  return state;
}

int64_t state_number(const Json& state, const std::string& folder, const char* key) {
  constexpr int64_t kMost = int64_t{1} << 53;
  const bool there = state.contains(key) && state[key].is_number_integer();
  TRIAD_CHECK(there && state[key].get<int64_t>() >= 0 && state[key].get<int64_t>() <= kMost,
              "{}/{}: `{}` is {}: a whole number from 0 to 2^53 is needed", folder, kStateFile, key,
              state.contains(key) ? brief(state[key]) : "absent");
  return state[key].get<int64_t>();
}

// An object in a checkpoint's state.json; null if it has none.
Json object_of(const Json& state, const std::string& folder, const char* key) {
  const Json object = state.value(key, Json());
  TRIAD_CHECK(object.is_null() || object.is_object(), "{}/{}: `{}` is {}: an object is needed", folder, kStateFile, key,
              brief(object));
  return object;
}
Json origin_of(const Json& state, const std::string& folder) { return object_of(state, folder, kOrigin); }

// `data` of a checkpoint's state.json, which has an object for each split.
Json data_of(const Json& state, const std::string& folder) {
  const Json data = object_of(state, folder, kData);
  for (const auto& [split, counts] : data.items())
    TRIAD_CHECK(counts.is_object(), "{}/{}: `{}.{}` is {}: an object is needed", folder, kStateFile, kData,
                shortened(split), brief(counts));
  return data;
}

// Throws if a run from before data.documents existed has JSONL among its texts: it read such a file as one document of
// plain text, but today each line is parsed.
void check_jsonl(const Json& state, const Config& config, const std::string& folder) {
  const Json& root = state["config"];
  if (config.data.kind != DataKind::text || (root.contains("data") && root["data"].contains("documents"))) return;
  for (const std::vector<std::string>* patterns : {&config.data.paths, &config.data.val_paths})
    for (const std::string& file : expand_globs(*patterns))
      if (is_jsonl(file))
        fail(
            "{}/{}: its run began before data.documents existed, and read {} as plain text, one document. Each line is "
            "parsed as a document now, so the run cannot go on: begin a new one, with train.init_from if its weights "
            "are to be kept",
            folder, kStateFile, file);
}

}  // namespace

Json state_json(const Config& config, const RunState& state) {
  Json json = {{"format", "triad checkpoint"},
               {"step", state.step},
               {"sequences", state.sequences},
               {"tokens", state.tokens},
               {"config", config_to_json(config)}};
  if (!state.origin.is_null()) json[kOrigin] = state.origin;
  if (!state.data.is_null()) json[kData] = state.data;
  return json;
}

void save_weights(Context& ctx, const Params& params, const std::string& path) {
  const Tensor master = params.master();
  std::vector<float> host(static_cast<size_t>(master.numel()));
  read_floats(ctx, host.data(), master);
  const Tensor on_host(reinterpret_cast<std::byte*>(host.data()), DType::f32, master.shape(), Device::cpu());
  write_buffers(params, {{"", on_host}}, path);
}

void save_weights(const Params& params, const Tensor& on_host, const std::string& path) {
  write_buffers(params, {{"", on_host}}, path);
}

std::vector<float> read_weights(const Params& params, const std::string& path) {
  const SafetensorsFile file(path);
  check_names(params, file, {with_prefix("")});
  return read_buffer(params, file, "");
}

void load_weights(Context& ctx, Params& params, const std::string& path) {
  params.set(ctx, read_weights(params, path));
}

std::vector<float> read_dense_weights(const Params& params, const std::string& path, uint64_t seed) {
  const SafetensorsFile file(path);
  check_names(params, file, {dense_source});
  std::vector<float> host(static_cast<size_t>(params.stored_elements()), 0.0f);
  read_into(host, params, file, dense_source);
  // The parameters that no tensor of the dense model begins.
  Runtime cpu({.device = Device::cpu()});
  for (int64_t i = 0; i < params.count(); ++i) {
    const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
    if (!dense_source(spec).empty()) continue;
    const int64_t begin = params.offset(i), n = spec.shape.numel();
    const Tensor values(reinterpret_cast<std::byte*>(host.data() + begin), DType::f32, {n}, Device::cpu());
    draw_range(cpu.ctx(), params, begin, begin + n, values, seed);
  }
  return host;
}

std::string save_checkpoint(const std::string& parent, const Params& params, const StateTensors& tensors,
                            const Config& config, const RunState& state,
                            const std::vector<Tokenizer::File>& tokenizer) {
  return write_checkpoint(parent, fmt::format("step_{}", state.step), [&](const std::string& folder) {
    write_buffers(params, {{"", tensors.master}}, folder + "/" + kWeightsFile);
    write_buffers(params, {{"exp_avg/", tensors.exp_avg}, {"exp_avg_sq/", tensors.exp_avg_sq}},
                  folder + "/" + kOptimizerFile);
    write_tokenizer_files(tokenizer, folder);
    write_file_atomically(folder + "/" + kStateFile, dump_json(state_json(config, state), 2) + "\n");
  });
}

void check_tokenizer(const std::string& folder, const Tokenizer& tokenizer) {
  for (const Tokenizer::File& file : tokenizer.files()) {
    const std::string own = folder + "/" + file.name;
    if (fs::exists(own) && read_file(own) != file.content)
      fail("{} is not what data.tokenizer = {} is now: its tokens would mean something else to the weights", own,
           tokenizer.name());
  }
}

RunState load_checkpoint(Context& ctx, const std::string& folder, Params& params, Optimizer& optimizer,
                         const Config& config) {
  const Json state = read_state(folder);
  const Config before = config_from_json(with_later_keys(state["config"]));
  for_each_difference(before, config, [&](const std::string& key, const std::string& theirs, const std::string& ours) {
    if (key == "data.tokenizer" && names_unknown_tokenizer(before, config)) return;
    if (decides_resume(key)) fail("{}: its {} is {}, the config's is {}", folder, key, theirs, ours);
  });
  check_jsonl(state, config, folder);
  const auto put = [&](Optimizer::State state_of, const std::vector<float>& flat) {
    optimizer.for_each_own(ctx, state_of, [&](const ElementRange& elements, const Tensor& values) {
      write_floats(ctx, values, flat.data() + elements.begin);
    });
  };
  put(Optimizer::State::parameter, read_weights(params, folder + "/" + kWeightsFile));
  optimizer.publish(ctx);
  const SafetensorsFile moments(folder + "/" + kOptimizerFile);
  check_names(params, moments, {with_prefix("exp_avg/"), with_prefix("exp_avg_sq/")});
  put(Optimizer::State::exp_avg, read_buffer(params, moments, "exp_avg/"));
  put(Optimizer::State::exp_avg_sq, read_buffer(params, moments, "exp_avg_sq/"));
  return {.step = state_number(state, folder, "step"),
          .sequences = state_number(state, folder, "sequences"),
          .tokens = state_number(state, folder, "tokens"),
          .origin = origin_of(state, folder),
          .data = data_of(state, folder)};
}

std::vector<std::string> differences(const Config& before, const Config& now) {
  std::vector<std::string> lines;
  for_each_difference(before, now, [&](const std::string& key, const std::string& theirs, const std::string& ours) {
    lines.push_back(fmt::format("{} {} -> {}", key, theirs, ours));
  });
  return lines;
}

Json config_of_checkpoint(const std::string& folder) { return with_later_keys(read_state(folder)["config"]); }

std::vector<std::string> changed_since(const std::string& folder, const Config& config) {
  return differences(config_from_json(config_of_checkpoint(folder)), config);
}

void save_initial(Context& ctx, const std::string& folder, const Params& params, const Config& config) {
  make_folders(folder);
  save_weights(ctx, params, folder + "/" + kWeightsFile);
  write_tokenizer_files(make_tokenizer(config.data.tokenizer_or_bytes())->files(), folder);
  write_file_atomically(folder + "/" + kStateFile, dump_json(state_json(config, {}), 2) + "\n");
}

ModelSource find_model(const std::string& path) {
  // Environment variables that set nsa.* keys (for example, to force a branch) apply to a trained model too.
  const auto source = [](Json config, const std::string& folder, const std::string& file, Json origin) {
    apply_environment(config, "nsa");
    try {
      return ModelSource{config_from_json(with_later_keys(std::move(config))), folder, folder + "/" + kWeightsFile,
                         std::move(origin)};
    } catch (const UsageError& e) { fail_usage("{}: {}", file, e.what()); }
  };
  const auto checkpoint = [&](const std::string& folder) {
    const Json state = read_state(folder);
    return source(state["config"], folder, folder + "/" + kStateFile, origin_of(state, folder));
  };
  // The folder of a run: its own weights have no state.json, but its checkpoints have.
  const auto run = [&](const std::string& folder) {
    const std::optional<std::string> newest = find_newest_checkpoint(folder + "/checkpoints");
    const std::string file = folder + "/config.json";
    return source(read_json_file(file), folder, file, newest ? origin_of(read_state(*newest), *newest) : Json());
  };
  if (fs::is_regular_file(path)) {
    const std::string parent = fs::path(path).parent_path().string(), folder = parent.empty() ? "." : parent;
    const bool state = fs::exists(folder + "/" + kStateFile);
    if (!state && !fs::exists(folder + "/config.json"))
      fail("{}: neither {} nor config.json beside it says of which model these weights are", path, kStateFile);
    ModelSource found = state ? checkpoint(folder) : run(folder);
    found.weights = path;
    return found;
  }
  const bool weights = fs::exists(path + "/" + kWeightsFile);
  if (weights && fs::exists(path + "/" + kStateFile)) return checkpoint(path);
  if (weights && fs::exists(path + "/config.json")) return run(path);
  return checkpoint(resolve_checkpoint(path));
}

}  // namespace triad
