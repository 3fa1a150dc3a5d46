#include "train/checkpoint/run_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <regex>
#include <span>
#include <system_error>
#include <vector>

#include "engine/process/parse.h"
#include "io/checkpoint.h"
#include "io/crc32.h"
#include "io/file.h"
#include "io/json_config.h"
#include "io/own_files.h"
#include "io/tensorboard.h"
#include "io/weight_index.h"
#include "train/checkpoint/final_weights.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

// A JSON object that holds all these keys; null for anything else.
Json object_with(const std::string& path, std::initializer_list<const char*> keys,
                 JsonComments comments = JsonComments::refused) {
  if (head_of(path).empty()) return nullptr;
  try {
    Json json = parse_json(read_file(path), path, comments);
    if (!json.is_object()) return nullptr;
    for (const char* key : keys)
      if (!json.contains(key)) return nullptr;
    return json;
  } catch (const std::exception&) { return nullptr; }
}

// A run's config: all groups, in a folder with env.json or formatted as a run formats it. A user's own config is not a
// run's file.
bool is_run_config(const std::string& path, bool marked) {
  const Json json = object_with(path, {"model", "nsa", "data", "train", "runtime", "log"});
  return !json.is_null() && (marked || read_file(path) == dump_json(json, 2) + "\n");
}
bool is_edited_config(const std::string& path) {
  const Json json = object_with(path, {}, JsonComments::allowed);
  const auto is_group = [&](const char* key) { return json.contains(key) && json[key].is_object(); };
  return !json.is_null() && (is_group("model") || is_group("train") || is_group("data") || is_group("log"));
}

bool is_env(const std::string& path) {
  return !object_with(path, {"build", "kernel", "device", "environment"}).is_null();  // as the first version had them
}
bool is_metrics(const std::string& path) { return !object_with(path, {"step", "train_loss"}).is_null(); }

// What the head of a rank's ranks/rank_R_collectives.csv has (engine/comm/comm_guard.cpp).
constexpr const char* kCollectivesHeader = "number,what,bytes";

// Files that are recognised by their first bytes: those with this name hold one of these words, at the beginning if
// `first` is set.
struct Known {
  std::regex name;
  bool first;
  std::vector<std::string_view> words;
};
const std::vector<Known>& known_files() {
  static const std::vector<Known> kAll = {
      {std::regex("selection_sample\\.json"), true, {"{\"schema\":"}},
      {std::regex("document_lengths\\.json"), false, {"\"longest\""}},
      {std::regex("training\\.csv"), true, {"step,loss,lr"}},
      {std::regex("val\\.csv"), true, {"step,val_loss"}},
      {std::regex("k_stats\\.csv"), true, {"step,layer,k_mean"}},
      {std::regex("gates\\.csv"), true, {"step,layer,entropy_mean"}},
      {std::regex("index\\.csv"), true, {"step,layer,index_loss"}},
      {std::regex("index_recall\\.csv"), true, {"step,layer,distance"}},
      {std::regex("fp8\\.csv"), true, {"step,role,flushed"}},
      {std::regex("fallback_counters\\.csv"), true, {"step,layer,branch"}},
      {std::regex("grad_ledger\\.csv"), true, {"step,parameter,norm"}},
      {std::regex("positions\\.csv"), true, {"from,to,positions,loss"}},
      {std::regex("needle(_(queries|variables|counting|copy))?\\.csv"), true, {"length,depth,samples"}},
      {std::regex("needle(_(queries|variables|counting|copy))?\\.svg"), false, {"style=\"max-width:"}},
      {std::regex("dtypes_report\\.txt"), true, {"role "}},
      {std::regex("opt_state_mb\\.txt"), false, {"\n\nmoments of ", "\n\nAdamW's moments of "}},
      {std::regex("all_missing_params\\.txt"), false, {": arrived="}},
      {std::regex("eval\\.jsonl"), true, {"{\"time\":"}},
      {std::regex("samples\\.jsonl"), true, {"{\"step\":"}},
      {std::regex("heartbeat_rank\\d+\\.jsonl"), false, {"\"ts\":"}},
      {std::regex("stackdump_rank\\d+_\\d+\\.txt"), false, {"\nwhy: "}},
      {std::regex("traces\\.log"), false, {": backward of its first micro-step"}},
      {std::regex("ddp_buckets(_rank\\d+)?\\.txt"), false, {"\nbucket,elements,mib"}},
      {std::regex("\\.anomaly_type"),
       true,
       {"throughput_flat\n", "loss_plateau\n", "host_memory_creep\n", "device_memory_creep\n", "gate_collapse\n",
        "gate_dead\n", "zero_gradients\n", "hung\n"}},
      {std::regex("mem_(boot|loader|oom|step\\d+)(_rank\\d+)?\\.txt"), false, {"memory summary"}},
      {std::regex("mem_(boot|loader|oom|step\\d+)(_rank\\d+)?\\.json"), false, {"\"allocation.all.current\""}},
      {std::regex("mem_(boot|loader|oom|step\\d+)(_rank\\d+)?\\.pickle"), true, {"\x80\x02"}}};
  return kAll;
}

// One folder's files.
class Files {
 public:
  explicit Files(const std::string& folder) : folder_(folder), env_(object_with(at("env.json"), {})) {
    if (!is_env(at("env.json"))) env_ = nullptr;
  }

  // Whether a run writes a file by this name, directly in its folder.
  static bool is_name(const std::string& name) {
    static const std::regex kJson("(config|env|metrics)\\.json");
    const auto matches = [&](const Known& known) { return std::regex_match(name, known.name); };
    return std::regex_match(name, kJson) || is_tokenizer_file_name(name) || is_tensor_file_name(name, kWeightsStem) ||
           std::ranges::any_of(known_files(), matches);
  }

  bool is_own(const std::string& name) const {
    const std::string path = at(name);
    std::error_code unknown;
    if (is_link_or_mount(path) || !fs::is_regular_file(path, unknown)) return false;
    if (is_empty_file(path)) return true;
    if (name == "config.json") return is_run_config(path, marked());
    if (name == "env.json") return is_env(path);
    if (name == "metrics.json") return is_metrics(path);
    if (is_tokenizer_file_name(name)) return is_own_tokenizer(name);
    if (is_tensor_file_name(name, kWeightsStem)) return is_own_tensor_file(path);
    const std::string head = head_of(path);
    for (const Known& known : known_files())
      if (std::regex_match(name, known.name))
        return std::ranges::any_of(known.words, [&](std::string_view word) {
          return known.first ? head.starts_with(word) : head.find(word) != std::string::npos;
        });
    return false;
  }

  bool marked() const { return !env_.is_null(); }
  std::string at(const std::string& name) const { return (fs::path(folder_) / name).string(); }

 private:
  // env.json has the tokenizer's checksums; earlier versions' runs did not record them, but copied the tokenizer into
  // each checkpoint.
  bool is_own_tokenizer(const std::string& name) const {
    try {
      const std::string content = read_file(at(name));
      if (marked() && env_.contains(kTokenizerSums)) {
        const Json& sums = env_[kTokenizerSums];
        return sums.is_object() && sums.contains(name) && sums[name] == content_checksum(content);
      }
      const std::optional<std::string> newest = find_newest_checkpoint(at("checkpoints"));
      return newest && content == read_file(*newest + "/" + name);
    } catch (const std::exception&) { return false; }
  }

  const std::string folder_;
  Json env_;
};

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code unreadable;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, unreadable))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

bool is_folder(const std::string& path) {
  std::error_code unknown;
  return fs::is_directory(path, unknown);
}
bool is_file(const std::string& path) {
  std::error_code unknown;
  return fs::is_regular_file(fs::symlink_status(path, unknown));
}

// Sorts what a checkpoints folder, or a set_aside_K in it, holds.
class Checkpoints {
 public:
  explicit Checkpoints(RunFiles& found) : found_(found) {}

  void list(const std::string& folder) {
    static const std::regex kStep("step_\\d+"), kAside("set_aside_\\d+");
    for (const std::string& name : names_in(folder)) {
      const std::string path = (fs::path(folder) / name).string();
      std::string target;
      if (is_temporary(name, &target)) {
        if (std::regex_match(target, kStep) && foreign_in_checkpoint(path).empty()) own_.push_back(path);
        if (target == "latest" && !is_folder(path)) own_.push_back(path);
      } else if (std::regex_match(name, kStep)) {
        add(path, foreign_in_checkpoint(path));
      } else if (std::regex_match(name, kAside)) {
        aside(path);
      } else if (name == "latest") {
        latest(folder, path);
      }
    }
  }
  std::vector<std::string> own() const { return own_; }

 private:
  void add(const std::string& path, const std::vector<std::string>& foreign) {
    if (foreign.empty())
      own_.push_back(path);
    else
      found_.foreign.insert(found_.foreign.end(), foreign.begin(), foreign.end());
  }

  // Checkpoints, final weights and metrics.json that a resume has moved.
  void aside(const std::string& folder) {
    if (is_link_or_mount(folder) || !is_folder(folder)) return add(folder, {folder});
    const Files files(folder);
    for (const std::string& name : names_in(folder)) {
      const std::string path = files.at(name);
      if (is_moved_link(name, path))
        own_.push_back(path);
      else if (is_folder(path) || fs::is_symlink(fs::symlink_status(path)))
        add(path, foreign_in_checkpoint(path));
      else
        add(path, files.is_own(name) ? std::vector<std::string>{} : std::vector{path});
    }
    found_.folders.push_back(folder);
  }

  // Whether set_aside() has made this link, in place of one that the user had made in `checkpoints`. It can be removed;
  // what it leads to stays.
  static bool is_moved_link(const std::string& name, const std::string& path) {
    static const std::regex kStep("step_\\d+");
    std::error_code error;
    const fs::path target = fs::read_symlink(path, error);
    return !error && target.is_absolute() && (std::regex_match(name, kStep) || name == "latest");
  }

  void latest(const std::string& parent, const std::string& path) {
    add(path, target_of_latest(parent) ? std::vector<std::string>{} : foreign_in_checkpoint(path));
  }

  RunFiles& found_;
  std::vector<std::string> own_;
};

// Whether a run has made a file in ranks/. A log is known only by env.json.
bool is_own_of_rank(const Files& files, const std::string& path) {
  if (!is_file(path) || is_link_or_mount(path)) return false;
  return files.marked() || is_empty_file(path) || head_of(path).find(kCollectivesHeader) != std::string::npos;
}

void list_ranks(RunFiles& found, const Files& files) {
  static const std::regex kNames("rank_\\d+(\\.log|_collectives\\.csv)");
  const std::string folder = files.at("ranks");
  for (const std::string& name : names_in(folder)) {
    const std::string path = folder + "/" + name;
    if (!std::regex_match(name, kNames)) continue;
    (is_own_of_rank(files, path) ? found.own : found.foreign).push_back(path);
  }
}

// Other programs' event files have other names than a new run's, and stay.
void list_events(RunFiles& found, const Files& files, const std::string& folder) {
  static const std::regex kNames("events\\.out\\.tfevents\\.\\d+\\..*");
  for (const std::string& name : names_in(folder)) {
    const std::string path = (fs::path(folder) / name).string();
    if (!is_file(path) || is_link_or_mount(path) || !std::regex_match(name, kNames)) continue;
    const bool old = files.marked() && head_of(path).find("_hparams_/session_start_info") != std::string::npos;
    if (old || head_of(path).find(kEventWriter) != std::string::npos) found.own.push_back(path);
  }
}

}  // namespace

RunFiles list_run_files(const std::string& folder) {
  RunFiles found;
  const Files files(folder);
  std::vector<std::string> last;
  for (const std::string& name : names_in(folder)) {
    const std::string path = files.at(name);
    if (name == "checkpoints" || name == "ranks" || name == "tb") {
      if (!is_folder(path)) found.foreign.push_back(path);
    } else if (Files::is_name(name)) {
      if (!files.is_own(name))
        found.foreign.push_back(path);
      else if (name == "config.json")
        last.push_back(path);
      else if (name != "env.json" && !is_tensor_file_name(name, kWeightsStem))
        found.own.push_back(path);
    }
  }
  const auto add = [&](const std::vector<std::string>& paths) {
    found.own.insert(found.own.end(), paths.begin(), paths.end());
  };
  add(unfinished_run_files(folder));
  list_ranks(found, files);
  for (const char* events : {"tb/by_tokens", "tb"}) {
    list_events(found, files, files.at(events));
    if (is_folder(files.at(events))) found.folders.push_back(files.at(events));
  }
  add(last);
  for (const std::string& path : weight_files_in(folder))
    if (is_own_tensor_file(path)) found.own.push_back(path);
  Checkpoints checkpoints(found);
  checkpoints.list(files.at("checkpoints"));
  add(checkpoints.own());
  if (files.marked() && files.is_own("env.json")) found.own.push_back(files.at("env.json"));
  for (const char* name : {"ranks", "checkpoints"})
    if (is_folder(files.at(name))) found.folders.push_back(files.at(name));
  std::sort(found.foreign.begin(), found.foreign.end());
  return found;
}

namespace {

// Whether a number in the name is larger than a run's steps and ranks can be: no run writes such a file.
bool has_impossible_number(const std::string& name) {
  static const std::regex kDigits("\\d+");
  return std::any_of(std::sregex_iterator(name.begin(), name.end(), kDigits), std::sregex_iterator(),
                     [](const std::smatch& digits) { return !parse_number<int64_t>(digits.str()); });
}

}  // namespace

std::vector<std::string> in_way_of_resume(const std::string& folder) {
  std::vector<std::string> foreign;
  const Files files(folder);
  for (const std::string& name : names_in(folder)) {
    const bool edited = name == "config.json" && is_edited_config(files.at(name));
    if (Files::is_name(name) && !has_impossible_number(name) && !edited && !files.is_own(name))
      foreign.push_back(files.at(name));
  }
  // A rank's log, without env.json, may be a run's or not: a resume appends to it, and replaces nothing.
  RunFiles ranks;
  list_ranks(ranks, files);
  std::ranges::copy_if(ranks.foreign, std::back_inserter(foreign),
                       [](const std::string& path) { return path.ends_with(".csv"); });
  return foreign;
}

std::vector<std::string> unfinished_run_files(const std::string& folder) {
  std::vector<std::string> found;
  for (const std::string& name : names_in(folder)) {
    std::string target;
    const std::string path = (fs::path(folder) / name).string();
    if (is_temporary(name, &target) && Files::is_name(target) && is_file(path) && !is_link_or_mount(path))
      found.push_back(path);
  }
  return found;
}

bool is_own_run_file(const std::string& folder, const std::string& name) { return Files(folder).is_own(name); }

std::string content_checksum(std::string_view content) {
  return fmt::format("{:08x}", crc32_of(std::as_bytes(std::span(content))));
}

}  // namespace triad
