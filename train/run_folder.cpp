#include "train/run_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <regex>
#include <system_error>

#include "engine/check.h"
#include "io/checkpoint.h"
#include "io/file.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

// Names that a run writes (SPEC.md section 3), whole or still temporary; whatever else is in the folder is the user's.
bool written_by_a_run(std::string name) {
  static const std::regex kNames(
      "config\\.json|env\\.json|(tokenizer|encoder|vocab)\\.json|vocab\\.bpe|merges\\.txt|metrics\\.json|model\\."
      "safetensors|checkpoints|ranks|tb|traces\\.log|\\.anomaly_type|"
      "(training|val|k_stats|gates|fallback_counters|grad_ledger|needle)\\.csv|needle\\.svg|"
      "(opt_state_mb|dtypes_report|ddp_buckets(_rank\\d+)?|all_missing_params)\\.txt|"
      "heartbeat_rank\\d+\\.jsonl|stackdump_rank\\d+_\\d+\\.txt|"
      "mem_(boot|loader|oom|step\\d+)(_rank\\d+)?\\.(txt|json|pickle)");
  std::string target;
  if (is_temporary(name, &target)) name = target;
  return std::regex_match(name, kNames);
}

}  // namespace

RunFolder::RunFolder(const std::string& path, Start start) : path_(path) {
  if (start == Start::join) return;
  std::error_code error;
  if (fs::exists(path, error) && !fs::is_directory(path, error)) fail("log.out_dir {} is not a folder", path);
  fs::create_directories(path, error);
  if (error) fail("log.out_dir {} cannot be made: {}", path, error.message());
  if (access(path.c_str(), W_OK | X_OK) != 0)
    fail("log.out_dir {} cannot be written to: {}", path, std::strerror(errno));
  if (fs::exists(file(".HALT")))
    fail("{} is there from an earlier run and would stop this one after its first step: remove it", file(".HALT"));
  if (fs::exists(file("state.json")))
    fail("log.out_dir {} is itself a checkpoint, or what `triad init` wrote: a run in it would mix with that", path);
  if (start == Start::resume) return;
  if (start == Start::fresh && find_newest_checkpoint(checkpoints()))
    fail("{} holds a checkpoint of an earlier run: --resume {} goes on with it, --overwrite starts anew and removes it",
         path, path);
  for (const fs::directory_entry& entry : fs::directory_iterator(path))
    if (written_by_a_run(entry.path().filename().string())) fs::remove_all(entry.path());
}

void RunFolder::rewind(int64_t step) const {
  for (const CheckpointFolder& checkpoint : list_checkpoints(checkpoints()))
    if (checkpoint.step > step) remove_tree(checkpoint.path);
  const std::string latest = checkpoints() + "/latest";
  if (fs::is_symlink(latest) && !fs::exists(latest)) fs::remove(latest);  // it pointed at one of those
  for (const char* name : {"model.safetensors", "metrics.json", ".anomaly_type", "needle.csv", "needle.svg"})
    fs::remove(file(name));  // all of the run's end
  static const std::regex kSnapshot("mem_step(\\d+)(_rank\\d+)?\\.(txt|json|pickle)");
  std::vector<fs::path> later;
  for (const fs::directory_entry& entry : fs::directory_iterator(path_)) {
    const std::string name = entry.path().filename().string();
    std::smatch match;
    if (std::regex_match(name, match, kSnapshot) && std::stoll(match[1].str()) > step) later.push_back(entry.path());
  }
  for (const fs::path& snapshot : later) fs::remove(snapshot);
}

bool is_inside(const std::string& path, const std::string& folder) {
  const fs::path relative = fs::weakly_canonical(path).lexically_relative(fs::weakly_canonical(folder));
  return !relative.empty() && *relative.begin() != "..";
}

bool RunFolder::halt_requested() const { return access(file(".HALT").c_str(), F_OK) == 0; }
void RunFolder::clear_halt() const { unlink(file(".HALT").c_str()); }

}  // namespace triad
