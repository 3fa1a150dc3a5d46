#include "train/run/run_folder.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <regex>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "io/checkpoint.h"
#include "io/csv.h"
#include "io/data/needle_grid.h"
#include "io/data/position_losses.h"
#include "io/file.h"
#include "io/json_config.h"
#include "io/jsonl.h"
#include "io/own_files.h"
#include "io/weight_index.h"
#include "train/checkpoint/final_weights.h"
#include "train/checkpoint/run_files.h"
#include "train/monitor/selection_sample.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

bool is_same(const fs::path& a, const fs::path& b) {
  std::error_code unknown;
  return fs::equivalent(a, b, unknown);
}

// Removes what an earlier run has made. Its folders stay if they hold other files, or are links or mount points.
void remove_run(const RunFiles& files) {
  for (const std::string& path : files.own)
    if (fs::is_directory(fs::symlink_status(path)))
      remove_checkpoint(path);
    else
      remove_tree(path);
  for (const std::string& folder : files.folders) ::rmdir(folder.c_str());
}

bool is_absent(const std::string& path) {
  return access(path.c_str(), F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR);
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
  const std::string checkpoints = path + "/checkpoints";
  if (start == Start::fresh && (find_newest_checkpoint(checkpoints) || !list_set_aside(checkpoints).empty()))
    fail("{} holds a checkpoint of an earlier run: --resume {} goes on with it, --overwrite starts anew and removes it",
         path, path);
  const std::vector<std::string> foreign =
      start == Start::resume ? in_way_of_resume(path) : list_run_files(path).foreign;
  if (!foreign.empty())
    fail(
        "{}: {} in the way of a run, which Triad has not made, or which changed since: move {}, or choose another "
        "log.out_dir",
        listed(foreign), foreign.size() == 1 ? "this is" : "these are", foreign.size() == 1 ? "it" : "them");
  if (start == Start::fresh && has_tensors(path))
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
  try {
    if (start == Start::resume)
      for (const std::string& unfinished : unfinished_run_files(path)) remove_tree(unfinished);
    else
      remove_run(list_run_files(path));
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

int64_t RunFolder::evaluations_since(const std::string& path) {
  const std::string metrics = path + "/metrics.json";
  try {
    return parse_json(read_file(metrics), metrics).value(kEvaluationsSince, int64_t{0});
  } catch (const std::exception&) { return 0; }
}

std::string RunFolder::rewind(int64_t step) const {
  // A save that was killed may have left a complete later checkpoint under its temporary name: it gets its name back.
  remove_leftovers(checkpoints());
  // The files to move. Those that mark a run's end are moved first: if this process is killed in between, the folder
  // does not look complete and can be resumed from its newest checkpoint.
  std::vector<std::string> later;
  if (has_tensors(path_) && complete_at(path_) != step) {
    if (fs::exists(file("metrics.json"))) later.push_back(file("metrics.json"));
    for (const std::string& path : weight_files_in(path_)) later.push_back(path);
  }
  const std::vector<CheckpointFolder> all = list_checkpoints(checkpoints());
  for (auto it = all.rbegin(); it != all.rend() && it->step > step; ++it) later.push_back(it->path);
  if (step_of_latest_folder(checkpoints()).value_or(-1) > step) later.push_back(checkpoints() + "/" + kLatest);
  std::string aside = later.empty() ? "" : set_aside(checkpoints(), later);
  // Removes a `latest` that points to a checkpoint that was moved.
  if (const auto target = target_of_latest(checkpoints()); target && !fs::exists(*target))
    fs::remove(checkpoints() + "/" + kLatest);
  // Removes the files that a run writes at its end.
  for (const std::string& path : weight_files_in(path_)) fs::remove(path);
  std::vector<std::string> ends = {"metrics.json", ".anomaly_type", kPositionsCsv};
  for (const auto& [word, kind] : EnumWords<NeedleKind>::words)
    for (const char* extension : {"csv", "svg"}) ends.push_back(needle_file(kind, extension));
  static const std::regex kSnapshot("mem_(oom|step(\\d+))(_rank\\d+)?\\.(txt|json|pickle)");
  for (const fs::directory_entry& entry : fs::directory_iterator(path_)) {
    const std::string name = entry.path().filename().string();
    std::smatch match;
    if (!std::regex_match(name, match, kSnapshot)) continue;
    const std::optional<int64_t> at = match[2].matched ? parse_number<int64_t>(match[2].str()) : std::nullopt;
    if (at ? *at > step : !match[2].matched) ends.push_back(name);
  }
  if (selection_sample_step(file(kSelectionSample)) > step) ends.push_back(kSelectionSample);
  for (const std::string& name : ends)
    if (is_own_run_file(path_, name)) fs::remove(file(name));
  // Rewinds every table that a run may have written: this run may write fewer than the earlier one did.
  for (const char* name : {"training.csv", "val.csv", "k_stats.csv", "gates.csv", "index.csv", "index_recall.csv",
                           "fp8.csv", "fallback_counters.csv", "grad_ledger.csv"})
    cut_csv(file(name), step);
  for (const char* name : {kSamplesFile, kEvaluationsFile}) cut_jsonl(file(name), step);
  return aside;
}

void RunFolder::hold(const std::string& run_id) {
  held_ = FileHandle(::open(path_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (held_.get() < 0) fail("log.out_dir {} cannot be opened: {}", path_, std::strerror(errno));
  run_id_ = run_id;
  has_env_ = !is_absent(file("env.json"));
}

bool RunFolder::lost() const {
  const std::lock_guard lock(mutex_);
  struct stat own {
  }, now{};
  if (held_.get() < 0 || ::fstat(held_.get(), &own) != 0) return false;
  if (::stat(path_.c_str(), &now) != 0) return errno == ENOENT || errno == ENOTDIR || errno == ESTALE;
  if (own.st_dev != now.st_dev || own.st_ino != now.st_ino) return true;
  // The folder is the same one, but its files may be another run's.
  const std::string env = file("env.json");
  if (::stat(env.c_str(), &now) != 0) return has_env_ && is_absent(env) && is_absent(file("config.json"));
  const std::pair<uint64_t, int64_t> found = {now.st_ino,
                                              int64_t{now.st_mtim.tv_sec} * 1'000'000'000 + now.st_mtim.tv_nsec};
  if (found == known_env_) return false;
  try {
    const Json json = parse_json(read_file(env), env);
    if (json.is_object() && json.contains(kRunId) && json[kRunId] != run_id_) return true;
  } catch (const Error&) { return false; }  // not another run's, which would be whole
  known_env_ = found;
  return false;
}

bool RunFolder::lost_after_failure() const {
  if (held_.get() < 0) return false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (!lost() && !(has_env_ && is_absent(file("env.json")))) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

std::string RunFolder::lost_text() const {
  return fmt::format("log.out_dir {} is not this run's folder any more: {}", path_, whereabouts());
}

void RunFolder::require() const {
  if (lost()) fail("{}", lost_text());
}

std::string RunFolder::whereabouts() const {
  std::error_code error;
  const std::string link = fmt::format("/proc/self/fd/{}", held_.get());
  const std::string now = fs::read_symlink(link, error).string();
  struct stat info {};
  const bool there = fs::exists(path_, error);
  if (there && is_same(path_, link))
    return fs::exists(file("env.json"), error) ? "the files in it are another run's" : "its files are being removed";
  const bool removed = now.empty() || (::fstat(held_.get(), &info) == 0 && info.st_nlink == 0);
  return (removed ? std::string("it was removed") : "it is now " + now) +
         (there ? ", and another folder is in its place" : "");
}

std::string RunFolder::make_rescue_folder() const {
  fs::path own = fs::path(path_).lexically_normal();
  if (!own.has_filename()) own = own.parent_path();
  std::error_code error;
  std::string why;
  for (const fs::path& parent : {own.parent_path(), fs::current_path(error), fs::temp_directory_path(error)}) {
    fs::create_directories(parent.empty() ? fs::path(".") : parent, error);
    for (int64_t k = 0;; ++k) {
      const fs::path folder = parent / fmt::format("{}.rescued_{}", own.filename().string(), k);
      if (fs::create_directory(folder, error)) return folder.string();
      if (error) why = folder.string() + ": " + error.message();
      if (error) break;
    }
  }
  fail("nothing could be saved: {}", why);
}

bool RunFolder::is_checkpoint_of(const std::string& path, const std::string& checkpoint) {
  const fs::path checkpoints = fs::path(path) / "checkpoints";
  const std::vector<CheckpointFolder> all = list_checkpoints(checkpoints.string());
  return is_same(fs::weakly_canonical(checkpoint).parent_path(), checkpoints) ||
         std::ranges::any_of(all, [&](const auto& each) { return is_same(each.path, checkpoint); });
}

bool is_inside(const std::string& path, const std::string& folder) {
  std::error_code unknown;
  for (fs::path up = fs::weakly_canonical(path); up.has_relative_path(); up = up.parent_path())
    if (is_same(up, folder)) return true;
  // A folder below may be the same one under another path, through a mount.
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, unknown)) {
    if (is_same(entry.path(), path)) return true;
    for (const fs::directory_entry& below : fs::directory_iterator(entry.path(), unknown))
      if (is_same(below.path(), path)) return true;
  }
  return false;
}

bool RunFolder::halt_requested() const { return access(file(".HALT").c_str(), F_OK) == 0; }
void RunFolder::clear_halt() const { unlink(file(".HALT").c_str()); }

}  // namespace triad
