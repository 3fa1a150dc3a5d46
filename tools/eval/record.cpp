#include "tools/eval/record.h"

#include <fmt/format.h>

#include <cstdio>
#include <ctime>
#include <filesystem>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/checkpoint.h"
#include "io/jsonl.h"
#include "train/checkpoint/run_files.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

// The run's folder: the one that is named, or that of the named checkpoint; empty if there is none.
fs::path run_folder(const fs::path& named, const fs::path& weights) {
  const auto is_run = [](const fs::path& folder) {
    return fs::exists(folder / "config.json") && is_own_run_file(folder.string(), "env.json");
  };
  if (is_run(named)) return named;
  if (is_run(weights)) return weights;
  const fs::path checkpoints = fs::weakly_canonical(weights).parent_path();
  return checkpoints.filename() == "checkpoints" && is_run(checkpoints.parent_path()) ? checkpoints.parent_path()
                                                                                      : fs::path();
}

// The step of the weights in a checkpoint or a run's folder; null if unknown.
Json step_of(const fs::path& weights) {
  for (const char* name : {kStateFile, "metrics.json"})
    if (const fs::path file = weights / name; fs::exists(file))
      return read_json_file(file.string()).value("step", Json());
  return {};
}

}  // namespace

void record_evaluation(const std::string& checkpoint, const ModelSource& model, const std::vector<std::string>& data,
                       const Json& result) {
  const fs::path folder = run_folder(checkpoint, model.folder);
  if (folder.empty()) return;
  const std::string path = (folder / kEvaluationsFile).string();
  try {
    if (fs::exists(path) && !is_own_run_file(folder.string(), kEvaluationsFile))
      fail("{} is not of `triad eval`: move it, and the report will show evaluations", path);
    char now[32];
    const std::time_t seconds = std::time(nullptr);
    std::tm utc{};
    std::strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&seconds, &utc));
    Json line = {{"time", now}, {"checkpoint", checkpoint}, {"step", step_of(model.folder)}, {"data", data}};
    for (const auto& [key, value] : result.items())
      if (!value.is_structured()) line[key] = value;
    JsonLines(path).append(line);
  } catch (const Error& e) {
    fmt::print(stderr, "triad: warning: the evaluation is not kept for the report: {}\n", printable(e.what()));
  }
}

}  // namespace triad
