#include "train/run_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <system_error>

#include "engine/check.h"
#include "io/checkpoint.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

// Names that a run writes, by prefix; whatever else is in the folder is the user's.
bool written_by_a_run(const std::string& name) {
  constexpr std::array kExact = {"config.json",
                                 "env.json",
                                 "training.csv",
                                 "val.csv",
                                 "k_stats.csv",
                                 "gates.csv",
                                 "fallback_counters.csv",
                                 "opt_state_mb.txt",
                                 "dtypes_report.txt",
                                 "ddp_buckets.txt",
                                 "traces.log",
                                 "all_missing_params.txt",
                                 "ranks",
                                 "tb",
                                 "checkpoints",
                                 "model.safetensors",
                                 "metrics.json"};
  constexpr std::array kPrefixes = {"heartbeat_rank", "mem_", "stackdump_rank"};
  for (const char* exact : kExact)
    if (name == exact) return true;
  for (const char* prefix : kPrefixes)
    if (name.starts_with(prefix)) return true;
  return false;
}

}  // namespace

RunFolder::RunFolder(const std::string& path, Start start) : path_(path) {
  std::error_code error;
  if (fs::exists(path, error) && !fs::is_directory(path, error)) fail("log.out_dir {} is not a folder", path);
  fs::create_directories(path, error);
  if (error) fail("log.out_dir {} cannot be made: {}", path, error.message());
  if (access(path.c_str(), W_OK | X_OK) != 0)
    fail("log.out_dir {} cannot be written to: {}", path, std::strerror(errno));
  if (fs::exists(file(".HALT")))
    fail("{} is there from an earlier run and would stop this one after its first step: remove it", file(".HALT"));
  if (start == Start::resume) return;
  if (start == Start::fresh && find_newest_checkpoint(checkpoints()))
    fail("{} holds a checkpoint of an earlier run: --resume {} goes on with it, --overwrite starts anew and removes it",
         path, path);
  for (const fs::directory_entry& entry : fs::directory_iterator(path))
    if (written_by_a_run(entry.path().filename().string())) fs::remove_all(entry.path());
}

bool RunFolder::halt_requested() const { return access(file(".HALT").c_str(), F_OK) == 0; }
void RunFolder::clear_halt() const { unlink(file(".HALT").c_str()); }

}  // namespace triad
