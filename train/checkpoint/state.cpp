#include "train/checkpoint/state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/chat/chat_format.h"
#include "io/checkpoint.h"
#include "io/data/dataset.h"
#include "io/file.h"
#include "io/own_files.h"
#include "io/safetensors.h"
#include "io/weight_index.h"
#include "model/from_dense.h"
#include "train/checkpoint/param_reader.h"
#include "train/checkpoint/run_files.h"
#include "train/checkpoint/state_part.h"
#include "train/config/load_config.h"
#include "train/config/schedule.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

constexpr const char* kOrigin = "origin";  // keys in state.json
constexpr const char* kData = "data";
constexpr const char* kChat = "chat";
constexpr const char* kBase = "base";
constexpr const char* kFiles = "files";
constexpr const char* kGroup = "packed_group";
constexpr const char* kValidation = "validation";
constexpr const char* kInitial = "init";  // checksums of `triad init`'s files

// Reads the values that this rank keeps.
void read_state(Context& ctx, const Params& params, Optimizer& optimizer, Optimizer::State state,
                const WeightIndex& index, const NameOf& name_of, Comm* shards) {
  std::vector<ElementRange> ranges;
  for (const Parts::Part& part : optimizer.parts(state)) ranges.push_back(part.elements);
  const std::vector<PartialSum> sums =
      read_params(index, params, name_of, ranges, ctx.device,
                  [&](int64_t begin, std::span<const float> values) { optimizer.set(ctx, state, begin, values); });
  if (shards != nullptr) check_sums(index, params, name_of, sums, *shards);
}

void clear_state(Context& ctx, Optimizer& optimizer, Optimizer::State state) {
  optimizer.for_each_own(ctx, state, [&](const ElementRange&, const Tensor& values) { zero(ctx, values); });
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

// Keys that a resume must not change: the weights fit no other model, the data cursor no other data, and the moments no
// other optimizer.
bool decides_resume(const std::string& key) {
  if (key == "data.stall_s") return false;
  return key.starts_with("model.") || key.starts_with("nsa.") || key.starts_with("data.") || key == "train.optimizer" ||
         key == "train.lora";
}

// Whether data.tokenizer may change: the data are shards, whose tokens stay the same, and the old config did not name
// their tokenizer (its value was "byte" or empty).
bool names_unknown_tokenizer(const Config& before, const Config& now) {
  return now.data.kind == DataKind::shards && before.data.tokenizer_or_bytes() == "byte";
}

// Whether data.tokenizer may change, because it names files that equal the checkpoint's copies.
bool same_tokenizer(const std::string& folder, const Config& before, const Config& now) {
  const auto contents = [](const Tokenizer& tokenizer) {
    std::vector<std::string> all;
    for (const Tokenizer::File& file : tokenizer.files()) all.push_back(file.content);
    return all;
  };
  if (find_tokenizer(folder).empty() || now.data.tokenizer_or_bytes() == "byte") return false;
  return contents(*tokenizer_of_checkpoint(folder, before.data.tokenizer)) == contents(*open_tokenizer(now.data));
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

// Checkpoints from before train.stages existed count sequences.
int64_t cursor_of(const Json& state, const std::string& folder, const Config& config) {
  if (!state.contains("sequences")) return state_number(state, folder, "cursor");
  return state_number(state, folder, "sequences") * config.train.seq_len;
}

// An object in a checkpoint's state.json; null if it has none.
Json object_of(const Json& state, const std::string& folder, const char* key) {
  const Json object = state.value(key, Json());
  TRIAD_CHECK(object.is_null() || object.is_object(), "{}/{}: `{}` is {}: an object is needed", folder, kStateFile, key,
              brief(object));
  return object;
}
// Sets weights, and master weights if there are any, from what the index's files have under name_of's names.
void load_all(Context& ctx, Params& params, const WeightIndex& index, const NameOf& name_of) {
  const ElementRange all{0, params.stored_elements()};
  read_params(index, params, name_of, {&all, 1}, ctx.device,
              [&](int64_t begin, std::span<const float> values) { params.set(ctx, begin, values); });
}

Json origin_of(const Json& state, const std::string& folder) { return object_of(state, folder, kOrigin); }

// `data` in a checkpoint's state.json, which has an object for each split.
Json data_of(const Json& state, const std::string& folder) {
  const Json data = object_of(state, folder, kData);
  for (const auto& [split, counts] : data.items())
    TRIAD_CHECK(counts.is_object(), "{}/{}: `{}.{}` is {}: an object is needed", folder, kStateFile, kData,
                shortened(split), brief(counts));
  return data;
}

// How the conversations in a checkpoint's data are written; null if there are none.
Json chat_of(const Json& state, const std::string& folder) {
  const Json data = data_of(state, folder);
  return data.is_null() ? Json() : data.value(kChat, Json());
}

std::string file_name_of(const SafetensorsFile& file) { return fs::path(file.path()).filename().string(); }
std::string text_of_checksum(uint32_t checksum) { return fmt::format("{:08x}", checksum); }

// Throws if a file in the index isn't the one that was there when state.json was written: the folder then holds files
// from several saves, after a copy that was cut short, for example. Checkpoints from before `files` existed pass.
void check_files(const Json& state, const std::string& folder, const std::vector<const WeightIndex*>& indices) {
  const Json files = object_of(state, folder, kFiles);
  if (files.is_null()) return;
  std::vector<std::string> others;
  for (const WeightIndex* index : indices)
    for (const SafetensorsFile& file : index->files()) {
      const std::optional<uint32_t> checksum = file.checksum();
      if (checksum && files.value(file_name_of(file), Json()) != text_of_checksum(*checksum))
        others.push_back(file_name_of(file));
    }
  if (others.empty()) return;
  fail(
      "{}: it holds files of several saves: {} {} not what {} belongs to (its `{}` has other checksums). Copy the "
      "whole "
      "folder again, or use another checkpoint",
      folder, fmt::join(others, ", "), others.size() == 1 ? "is" : "are", kStateFile, kFiles);
}

// An object, or for a mixture a list with one for each component.
RowGroups groups_of(const Json& state, const std::string& folder) {
  const Json group = state.value(kGroup, Json());
  RowGroups groups;
  for (const Json& object : group.is_array() ? group : group.is_null() ? Json::array() : Json::array({group})) {
    TRIAD_CHECK(object.is_object(), "{}/{}: `{}` is {}: an object or a list of objects is needed", folder, kStateFile,
                kGroup, brief(group));
    groups.push_back({state_number(object, folder, "group"), state_number(object, folder, "first_row")});
  }
  return groups;
}

// Checkpoints from before train.keep_best existed, and those before the first evaluation, have none.
Validation validation_of(const Json& state, const std::string& folder) {
  const Json object = object_of(state, folder, kValidation);
  Validation validation;
  if (object.is_null()) return validation;
  validation.since = state_number(object, folder, "since");
  if (!object.contains("best_step")) return validation;
  validation.best_step = state_number(object, folder, "best_step");
  const Json loss = object.value("best_loss", Json());
  TRIAD_CHECK(loss.is_number(), "{}/{}: `{}.best_loss` is {}: a number is needed", folder, kStateFile, kValidation,
              brief(loss));
  validation.best_loss = loss.get<double>();
  return validation;
}

// Whether the checkpoint says what its data hold.
bool knows_files(const Json& state, const std::string& folder) {
  const Json data = data_of(state, folder);
  return !data.is_null() && data.value("train", Json::object()).contains("files");
}

// Throws if a run from before data.documents existed has JSONL among its texts: it read such a file as one plain-text
// document, but today each line is parsed.
void check_jsonl(const Json& state, const Config& config, const std::string& folder) {
  const Json& root = state["config"];
  if (config.data.kind != DataKind::text || (root.contains("data") && root["data"].contains("documents"))) return;
  for (const std::vector<std::string>& patterns : {config.data.paths(), config.data.val_paths})
    for (const std::string& file : expand_globs(patterns))
      if (content_of(file, config.data.format) == Content::jsonl)
        fail(
            "{}/{}: its run began before data.documents existed, and read {} as plain text, one document. Each line is "
            "parsed as a document now, so the run cannot go on: begin a new one, with train.init_from if its weights "
            "are to be kept",
            folder, kStateFile, file);
}

}  // namespace

void Validation::add(const TrainConfig& train, int64_t step, double loss) {
  if (best_step >= 0 && stage_at(train, best_step - 1).index != stage_at(train, step - 1).index) *this = {};
  if (std::isfinite(loss) && (best_step < 0 || loss < best_loss))
    *this = {.best_step = step, .best_loss = loss};
  else
    ++since;
}

Json state_json(const Config& config, const RunState& state, const Json& files) {
  Json json = {{"format", "triad checkpoint"},
               {"step", state.step},
               {"cursor", state.cursor},
               {"tokens", state.tokens},
               {"config", config_to_json(config)}};
  if (!state.origin.is_null()) json[kOrigin] = state.origin;
  if (const Validation& v = state.validation; v.any()) {
    json[kValidation] = {{"since", v.since}};
    if (v.best_step >= 0) json[kValidation].update({{"best_step", v.best_step}, {"best_loss", v.best_loss}});
  }
  if (!state.data.is_null()) json[kData] = state.data;
  if (!state.base.is_null()) json[kBase] = state.base;
  if (!files.is_null()) json[kFiles] = files;
  if (std::any_of(state.groups.begin(), state.groups.end(), [](const RowGroup& g) { return g.group > 0; })) {
    Json groups = Json::array();
    for (const RowGroup& g : state.groups) groups.push_back({{"group", g.group}, {"first_row", g.first_row}});
    json[kGroup] = groups.size() == 1 ? groups.front() : groups;
  }
  return json;
}

Json checksums_of_files(const std::string& folder) {
  Json checksums = Json::object();
  for (const char* stem : {kWeightsStem, kMomentsStem}) {
    if (!has_tensors(folder, stem)) continue;
    const WeightIndex index(tensors_path(folder, stem));
    for (const SafetensorsFile& file : index.files())
      if (const auto checksum = file.checksum()) checksums[file_name_of(file)] = text_of_checksum(*checksum);
  }
  return checksums;
}

void save_weights(Context& ctx, const Params& params, const std::string& path) {
  const StatePart all(params, {0, params.count()}, Device::cpu(), {{params.master().dtype}});
  all.copy(ctx, 0, {0, params.stored_elements()}, params.master());
  ctx.stream.synchronize();
  write_part(all, params, {{"", 0}}, path);
}

void load_weights(Context& ctx, Params& params, const std::string& path) {
  const WeightIndex index(path);
  check_names(index, params, {with_prefix("")});
  params.clear(ctx);
  load_all(ctx, params, index, with_prefix(""));
}

void load_dense_weights(Context& ctx, Params& params, const std::string& path, uint64_t seed) {
  const WeightIndex index(path);
  check_names(index, params, {dense_source});
  params.init(ctx, seed);
  load_all(ctx, params, index, dense_source);
}

void read_weights(Context& ctx, const Params& params, Optimizer& optimizer, const std::string& path, Comm* shards) {
  const WeightIndex index(path);
  check_names(index, params, {with_prefix("")});
  clear_state(ctx, optimizer, Optimizer::State::parameter);
  read_state(ctx, params, optimizer, Optimizer::State::parameter, index, with_prefix(""), shards);
  optimizer.publish(ctx);
}

void read_other_weights(Context& ctx, const Params& params, Optimizer& optimizer, const std::string& path,
                        const NameOf& name_of, const std::vector<ParamSpec>& unread, uint64_t seed, Comm* shards) {
  const WeightIndex index(path);
  check_names(index, params, {name_of}, unread);
  optimizer.init(ctx, seed);
  read_state(ctx, params, optimizer, Optimizer::State::parameter, index, name_of, shards);
  optimizer.publish(ctx);
}

void check_tokenizer(const std::string& folder, const Tokenizer& tokenizer) {
  const std::vector<Tokenizer::File> files = tokenizer.files();
  const auto differs = [&](const std::string& own) {
    fail("{} is not what data.tokenizer = {} is now: its tokens would mean something else to the weights", own,
         tokenizer.name());
  };
  bool has_separator = false;
  for (const Tokenizer::File& file : files) {
    const std::string own = folder + "/" + file.name;
    if (fs::exists(own) && read_file(own) != file.content) differs(own);
    has_separator = has_separator || file.name == kSeparatorFile;
  }
  const std::string separator = folder + "/" + kSeparatorFile;
  if (!files.empty() && !has_separator && fs::exists(separator)) differs(separator);
}

RunState load_checkpoint(Context& ctx, const std::string& folder, const Params& params, Optimizer& optimizer,
                         const Config& config, Comm* shards, bool accept_changed_data) {
  const Json state = read_state(folder);
  const Config before = config_from_json(with_later_keys(state["config"]));
  for_each_difference(before, config, [&](const std::string& key, const std::string& theirs, const std::string& ours) {
    if (key == "data.tokenizer" && (names_unknown_tokenizer(before, config) || same_tokenizer(folder, before, config)))
      return;
    const bool place = key == "data.paths" || key == "data.val_paths" || key == "data.chat_template";
    if (place && (accept_changed_data || knows_files(state, folder))) return;
    if (decides_resume(key))
      fail("{}: its {} is {}, the config's is {}{}", folder, key, theirs, ours,
           place ? ", and the checkpoint does not say what its data hold, to be compared: --accept-changed-data goes on"
                 : "");
  });
  if (const int64_t theirs = before.train.longest_seq_len(), ours = config.train.longest_seq_len(); theirs != ours)
    fail("{}: its train.seq_len{} is {}, the config's is {}", folder,
         before.train.stages.empty() && config.train.stages.empty() ? "" : " (the longest of train.stages)", theirs,
         ours);
  check_jsonl(state, config, folder);
  const WeightIndex weights(tensors_path(folder)), moments(tensors_path(folder, kMomentsStem));
  check_files(state, folder, {&weights, &moments});
  read_weights(ctx, params, optimizer, tensors_path(folder), shards);
  const NameOf square_of = [&](const ParamSpec& spec) {
    const bool kept = Optimizer::keeps(Optimizer::State::exp_avg_sq, spec, config.train.optimizer);
    return kept ? kAvgSqPrefix + spec.name : "";
  };
  check_names(moments, params, {with_prefix(kAvgPrefix), square_of});
  for (const auto& [which, name_of] :
       {std::pair{Optimizer::State::exp_avg, with_prefix(kAvgPrefix)}, {Optimizer::State::exp_avg_sq, square_of}}) {
    clear_state(ctx, optimizer, which);
    read_state(ctx, params, optimizer, which, moments, name_of, shards);
  }
  return {.step = state_number(state, folder, "step"),
          .cursor = cursor_of(state, folder, before),
          .tokens = state_number(state, folder, "tokens"),
          .origin = origin_of(state, folder),
          .data = data_of(state, folder),
          .base = object_of(state, folder, kBase),
          .groups = groups_of(state, folder),
          .validation = validation_of(state, folder)};
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

namespace {

// A checksum by which a `triad init` file is recognised: for a tensor file, over the checksums in its header; else over
// the content.
std::string initial_sum(const std::string& path) {
  if (fs::path(path).filename() != whole_file_name(kWeightsStem)) return content_checksum(read_file(path));
  const SafetensorsFile file(path);
  std::string sums;
  for (const auto& [key, value] : file.metadata()) sums += fmt::format("{} {}\n", key, value);
  return content_checksum(sums);
}

bool have_same_bytes(const std::string& a_path, const std::string& b_path) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  const InputFile a(a_path), b(b_path);
  if (a.size() != b.size()) return false;
  for (int64_t at = 0; at < a.size(); at += kBytes)
    if (a.text(at, kBytes) != b.text(at, kBytes)) return false;
  return true;
}

// Whether the file is what save_weights() would write.
bool holds_weights(Context& ctx, const Params& params, const std::string& path) {
  const std::string compared = temporary_name(path);
  save_weights(ctx, params, compared);
  try {
    const bool same = have_same_bytes(compared, path);
    remove_tree(compared);
    return same;
  } catch (...) {
    remove_tree(compared);
    throw;
  }
}

}  // namespace

bool save_initial(Context& ctx, const std::string& folder, const Params& params, const Config& config) {
  make_folders(folder);
  const std::string weights = whole_file_name(kWeightsStem), path = folder + "/" + weights;
  std::error_code unknown;
  if (fs::exists(fs::symlink_status(path, unknown)) && !is_initial_file(folder, weights)) {
    if (!holds_weights(ctx, params, path)) return false;
  } else {
    save_weights(ctx, params, path);
  }
  const std::vector<Tokenizer::File> tokenizer = open_tokenizer(config.data)->files();
  write_tokenizer_files(tokenizer, folder);
  Json state = state_json(config, {});
  state[kInitial][weights] = initial_sum(folder + "/" + weights);
  for (const Tokenizer::File& file : tokenizer) state[kInitial][file.name] = content_checksum(file.content);
  write_file_atomically(folder + "/" + kStateFile, dump_json(state, 2) + "\n");
  return true;
}

bool is_initial_file(const std::string& folder, const std::string& name) {
  try {
    const std::string path = folder + "/" + name, state_path = folder + "/" + kStateFile;
    if (is_link_or_mount(path) || is_link_or_mount(state_path)) return false;
    const Json state = parse_json(read_file(state_path), state_path);
    if (!state.is_object() || !state.contains(kInitial) || state.value("step", Json()) != 0) return false;
    if (name == kStateFile) return true;
    return state[kInitial].contains(name) && state[kInitial][name] == initial_sum(path);
  } catch (const std::exception&) { return false; }  // damaged, or another program's
}

std::optional<ChatFormat> trained_chat(const ModelSource& source) {
  const std::string place = source.folder + "/" + kStateFile;
  if (!source.chat.is_null()) return ChatFormat::from_json(source.chat, place);
  return ChatFormat::from_files(imported_chat_files({{kOrigin, source.origin}}), place);
}

ModelSource find_model(const std::string& path) {
  // The config that a checkpoint holds, changed by environment variables for nsa.* keys (to force a branch, say), which
  // apply to a trained model too.
  const auto source = [](Json config, const std::string& folder, const std::string& file, const Json& state) {
    apply_environment(config, "nsa");
    try {
      return ModelSource{config_from_json(with_later_keys(std::move(config))),
                         folder,
                         tensors_path(folder),
                         origin_of(state, folder),
                         object_of(state, folder, kBase),
                         chat_of(state, folder)};
    } catch (const UsageError& e) { fail_usage("{}: {}", file, e.what()); }
  };
  const auto checkpoint = [&](const std::string& folder) {
    const Json state = read_state(folder);
    // Several files are a model only together; a whole one is whatever the user has put there.
    if (const std::string tensors = tensors_path(folder);
        tensors.ends_with(index_file_name("")) && has_tensors(folder)) {
      const WeightIndex weights(tensors);
      check_files(state, folder, {&weights});
    }
    return source(state["config"], folder, folder + "/" + kStateFile, state);
  };
  // A run's folder: its own weights have no state.json, but its checkpoints have.
  const auto run = [&](const std::string& folder) {
    const std::optional<std::string> newest = find_newest_checkpoint(folder + "/checkpoints");
    const std::string file = folder + "/config.json";
    const Json state = newest ? read_state(*newest) : Json::object();
    return source(read_json_file(file), folder, file, state);
  };
  // A file called `latest` names a checkpoint (io/checkpoint.h).
  if (fs::is_regular_file(path) && fs::path(path).filename() != kLatest) {
    const std::string parent = fs::path(path).parent_path().string(), folder = parent.empty() ? "." : parent;
    refuse_adapter(folder);
    const bool state = fs::exists(folder + "/" + kStateFile);
    if (!state && !fs::exists(folder + "/config.json"))
      fail("{}: neither {} nor config.json beside it says of which model these weights are", path, kStateFile);
    ModelSource found = state ? checkpoint(folder) : run(folder);
    found.weights = path;
    return found;
  }
  const bool weights = has_tensors(path);
  if (weights && fs::exists(path + "/" + kStateFile)) return checkpoint(path);
  if (weights && fs::exists(path + "/config.json")) return run(path);
  return checkpoint(resolve_checkpoint(path));
}

}  // namespace triad
