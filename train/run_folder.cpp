#include "train/run_folder.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <regex>
#include <system_error>
#include <vector>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "io/checkpoint.h"
#include "io/csv.h"
#include "io/data/needle_grid.h"
#include "io/data/position_losses.h"
#include "io/file.h"
#include "io/json_config.h"
#include "io/weight_index.h"
#include "train/checkpoint/final_weights.h"
#include "train/monitor/selection_sample.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

// Whether a run writes a file or folder of this name, or its temporary version. All other files in the folder belong to
// the user.
bool written_by_a_run(std::string name) {
  static const std::regex kNames(
      "(config|env|metrics|selection_sample|document_lengths)\\.json|(tokenizer|encoder|vocab|separator)\\.json|"
      "vocab\\.bpe|"
      "merges\\.txt|checkpoints|ranks|tb|traces\\.log|\\.anomaly_type|"
      "(training|val|k_stats|gates|fallback_counters|grad_ledger|positions)\\.csv|"
      "needle(_(queries|variables|counting|copy))?\\.(csv|svg)|"
      "(opt_state_mb|dtypes_report|ddp_buckets(_rank\\d+)?|all_missing_params)\\.txt|"
      "heartbeat_rank\\d+\\.jsonl|stackdump_rank\\d+_\\d+\\.txt|"
      "mem_(boot|loader|oom|step\\d+)(_rank\\d+)?\\.(txt|json|pickle)");
  std::string target;
  if (is_temporary(name, &target)) name = target;
  return std::regex_match(name, kNames) || is_tensor_file_name(name, kWeightsStem);
}

// Removes the checkpoints, complete or not, and their folder. If the folder is a symbolic link (to another disk, for
// example), the link stays, and so do other files in its target.
void remove_checkpoints(const fs::path& folder) {
  if (!fs::is_directory(folder)) return remove_tree(folder.string());
  const bool linked = fs::is_symlink(folder);
  // Completes some leftover checkpoints, which the next lines then remove.
  if (linked) remove_leftovers(folder.string());
  for (const CheckpointFolder& checkpoint : list_checkpoints(folder.string())) remove_checkpoint(checkpoint.path);
  for (const std::string& aside : list_set_aside(folder.string())) remove_tree(aside);
  if (!linked) return remove_tree(folder.string());
  if (target_of_latest(folder.string())) fs::remove(folder / kLatest);
}

// The step of the selection sample in a file; -1 if the file does not exist; the largest integer if it is damaged.
int64_t selection_sample_step(const std::string& path) {
  std::error_code unknown;
  if (!fs::exists(path, unknown)) return -1;
  try {
    return parse_json(read_file(path), path).at("step").get<int64_t>();
  } catch (const std::exception&) { return std::numeric_limits<int64_t>::max(); }
}

}  // namespace

void lock_run_folder(FolderLock& lock, const std::string& path) {
  constexpr double kWaitS = 10;
  std::error_code error;
  if (fs::is_directory(path, error) && !lock.take_within(kWaitS, path))
    fail("log.out_dir {} is in use by another run{}: stop that one, or choose another folder", path, lock_holder(path));
}

void RunFolder::refuse(const std::string& path, Start start) {
  std::error_code unknown;  // not read: the constructor reports a folder that cannot be read
  const auto holds = [&](const char* name) { return fs::exists(path + "/" + name, unknown); };
  if (holds(".HALT"))
    fail("{}/.HALT is there from an earlier run and would stop this one after its first step: remove it", path);
  if (holds("state.json"))
    fail("log.out_dir {} is itself a checkpoint, or what `triad init` wrote: a run in it would mix with that", path);
  if (start != Start::fresh) return;
  const std::string checkpoints = path + "/checkpoints";
  if (find_newest_checkpoint(checkpoints) || !list_set_aside(checkpoints).empty())
    fail("{} holds a checkpoint of an earlier run: --resume {} goes on with it, --overwrite starts anew and removes it",
         path, path);
  if (has_tensors(path))
    fail("{} holds the final weights of an earlier run, {}: --overwrite starts anew and removes them", path,
         tensors_path(path));
}

void RunFolder::refuse_older(const std::string& path, const std::string& resume_from) {
  std::vector<std::string> newer;
  if (find_newest_checkpoint(path + "/checkpoints") == resume_from) return;  // it may be `latest`
  for (const CheckpointFolder& checkpoint : list_checkpoints(path + "/checkpoints")) {
    newer.push_back(fs::path(checkpoint.path).filename().string());
    if (fs::equivalent(checkpoint.path, resume_from)) newer.clear();
  }
  if (newer.empty()) return;
  fail(
      "{} is not the newest checkpoint of {}: {} {} newer. --resume {} continues from the newest. To resume from the "
      "older one, add --overwrite: newer checkpoints and the final weights are then moved to {}",
      resume_from, path, fmt::join(newer, ", "), newer.size() == 1 ? "is" : "are", path,
      next_set_aside(path + "/checkpoints"));
}

RunFolder::RunFolder(const std::string& path, Start start, FolderLock& lock) : path_(path) {
  if (start == Start::join) return;
  std::error_code error;
  if (fs::exists(path, error) && !fs::is_directory(path, error)) fail("log.out_dir {} is not a folder", path);
  try {
    make_folders(path);
  } catch (const Error& e) { fail("log.out_dir {}", e.what()); }
  if (access(path.c_str(), W_OK | X_OK) != 0)
    fail("log.out_dir {} cannot be written to: {}", path, std::strerror(errno));
  lock_run_folder(lock, path);
  refuse(path, start);
  // The files to remove: on a resume, only temporary ones. The most valuable files are removed last, so that they
  // survive if the removal of an earlier file fails.
  std::vector<fs::path> old;
  for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
    const std::string name = entry.path().filename().string();
    if (written_by_a_run(name) && (start != Start::resume || is_temporary(name))) old.push_back(entry.path());
  }
  const auto worth = [](const fs::path& each) {
    const std::string name = each.filename().string();
    return name == "checkpoints" ? 2 : is_tensor_file_name(name, kWeightsStem) ? 1 : 0;
  };
  std::stable_sort(old.begin(), old.end(), [&](const auto& a, const auto& b) { return worth(a) < worth(b); });
  try {
    for (const fs::path& each : old) {
      if (each.filename() == "checkpoints")
        remove_checkpoints(each);
      else
        remove_tree(each.string());
    }
  } catch (const Error& e) { fail("log.out_dir {} cannot be emptied for this run: {}", path, e.what()); }
}

std::optional<int64_t> RunFolder::complete_at(const std::string& path) {
  std::error_code unknown;
  const std::string metrics = path + "/metrics.json";
  if (!fs::exists(metrics, unknown) || !has_tensors(path)) return {};
  try {
    return parse_json(read_file(metrics), metrics).at("step").get<int64_t>();
  } catch (const std::exception&) {  // metrics.json is damaged: the run counts as incomplete, so its end is repeated
    return {};
  }
}

std::string RunFolder::rewind(int64_t step) const {
  // The files to move. Those that mark the end of a run are moved first: if this process is killed in between, the
  // folder does not look complete and can be resumed from its newest checkpoint.
  std::vector<std::string> later;
  if (has_tensors(path_) && complete_at(path_) != step) {
    if (fs::exists(file("metrics.json"))) later.push_back(file("metrics.json"));
    for (const std::string& path : weight_files_in(path_)) later.push_back(path);
  }
  const std::vector<CheckpointFolder> all = list_checkpoints(checkpoints());
  for (auto it = all.rbegin(); it != all.rend() && it->step > step; ++it) later.push_back(it->path);
  if (step_of_latest_folder(checkpoints()).value_or(-1) > step) later.push_back(checkpoints() + "/" + kLatest);
  std::string aside = later.empty() ? "" : set_aside(checkpoints(), later);
  // A save that was killed may have left a complete later checkpoint under its temporary name. remove_leftovers()
  // renames it, as the next save would, so that the loop removes it.
  remove_leftovers(checkpoints());
  for (const CheckpointFolder& checkpoint : list_checkpoints(checkpoints()))
    if (checkpoint.step > step) remove_checkpoint(checkpoint.path);
  // Removes a `latest` that points to a checkpoint that was moved.
  if (const auto target = target_of_latest(checkpoints()); target && !fs::exists(*target))
    fs::remove(checkpoints() + "/" + kLatest);
  // Removes the files that a run writes at its end.
  for (const std::string& path : weight_files_in(path_)) fs::remove(path);
  for (const char* name : {"metrics.json", ".anomaly_type", kPositionsCsv}) fs::remove(file(name));
  for (const auto& [word, kind] : EnumWords<NeedleKind>::words)
    for (const char* extension : {"csv", "svg"}) fs::remove(file(needle_file(kind, extension)));
  static const std::regex kSnapshot("mem_(oom|step(\\d+))(_rank\\d+)?\\.(txt|json|pickle)");
  std::vector<fs::path> snapshots;
  for (const fs::directory_entry& entry : fs::directory_iterator(path_)) {
    const std::string name = entry.path().filename().string();
    std::smatch match;
    if (!std::regex_match(name, match, kSnapshot)) continue;
    const std::optional<int64_t> at = match[2].matched ? parse_number<int64_t>(match[2].str()) : std::nullopt;
    if (at ? *at > step : !match[2].matched) snapshots.push_back(entry.path());
  }
  for (const fs::path& snapshot : snapshots) fs::remove(snapshot);
  if (selection_sample_step(file(kSelectionSample)) > step) fs::remove(file(kSelectionSample));
  // Rewinds every table that a run may have written: this run may write fewer of them than the earlier one did.
  for (const char* name :
       {"training.csv", "val.csv", "k_stats.csv", "gates.csv", "fallback_counters.csv", "grad_ledger.csv"})
    cut_csv(file(name), step);
  return aside;
}

bool is_inside(const std::string& path, const std::string& folder) {
  const fs::path relative = fs::weakly_canonical(path).lexically_relative(fs::weakly_canonical(folder));
  return !relative.empty() && *relative.begin() != "..";
}

bool RunFolder::halt_requested() const { return access(file(".HALT").c_str(), F_OK) == 0; }
void RunFolder::clear_halt() const { unlink(file(".HALT").c_str()); }

}  // namespace triad
