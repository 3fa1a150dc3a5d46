#include "tools/report/find_runs.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "engine/check.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

constexpr int kDepth = 3;

bool has(const fs::path& folder, const char* name) {
  std::error_code unreadable;
  return fs::exists(folder / name, unreadable);
}

void find(const fs::path& folder, int depth, std::vector<std::string>& found) {
  std::error_code unreadable;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, unreadable)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with('.') || !entry.is_directory(unreadable)) continue;
    const auto holds = [&](const char* file) { return has(entry.path(), file); };
    if (holds("config.json") && (holds("env.json") || holds("training.csv") || holds("heartbeat_rank0.jsonl")))
      found.push_back(entry.path().string());
    else if (depth > 1)
      find(entry.path(), depth - 1, found);
  }
}

}  // namespace

bool is_run(const std::string& folder) {
  TRIAD_CHECK(fs::exists(folder), "{}: there is no such folder", folder);
  TRIAD_CHECK(fs::is_directory(folder), "{} is not a folder: a run's is needed, or one that holds runs", folder);
  return has(folder, "config.json");
}

std::vector<std::string> runs_in(const std::string& folder) {
  std::vector<std::string> found;
  find(folder, kDepth, found);
  TRIAD_CHECK(!found.empty(), "{} holds no run: neither it nor a folder in it has a run's config.json", folder);
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace triad
