#include "tools/eval/needle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "io/file.h"
#include "io/json_config.h"
#include "tools/output_folder.h"
#include "train/checkpoint/run_files.h"
#include "train/inference.h"
#include "train/run/data_source.h"

namespace triad {

namespace {

// The model's most likely token at each position with a target (>= 0). The batch is padded at its end, which does not
// change earlier positions.
std::vector<int32_t> answers_of(LoadedModel& loaded, std::span<const int32_t> tokens,
                                std::span<const int32_t> targets) {
  const int64_t rows = loaded.activations().rows();
  std::vector<int32_t> padded(tokens.begin(), tokens.end());
  padded.resize(static_cast<size_t>(rows), 0);
  loaded.set_tokens(padded);
  loaded.model().forward(loaded.ctx(), loaded.activations());
  std::vector<int32_t> answers;
  for (size_t i = 0; i < targets.size();) {
    size_t n = 0;  // an answer's tokens follow each other
    while (i + n < targets.size() && targets[i + n] >= 0 && n < static_cast<size_t>(LoadedModel::kLogitRows)) ++n;
    if (n > 0) {
      const std::vector<int32_t> likeliest = loaded.likeliest(static_cast<int64_t>(i), static_cast<int64_t>(n));
      for (size_t j = 0; j < n; ++j)
        TRIAD_CHECK(likeliest[j] >= 0, "a logit after token {} is not finite: weights that are not finite?", i + j);
      answers.insert(answers.end(), likeliest.begin(), likeliest.end());
    }
    i += std::max<size_t>(n, 1);
  }
  return answers;
}

// The task with another one's sizes. It asks one question where the other's question count means something else (keys),
// or where there is one needle (copy).
NeedleTask with_kind(NeedleTask task, NeedleKind kind) {
  if (kind != task.kind && (task.kind == NeedleKind::keys || kind == NeedleKind::copy)) task.questions = 1;
  task.kind = kind;
  return task;
}

}  // namespace

void eval_needle(const NeedleEval& o) {
  const ModelSource source = find_model(o.checkpoint);
  NeedleTask task = needle_task(source.config);
  if (source.config.data.kind != DataKind::needle)
    fail_usage(
        "--needle: {} was trained on data.kind {}; only a model trained on data.kind needle has learned the task",
        o.checkpoint, word_of(source.config.data.kind));
  for (const auto& [word, kind] : EnumWords<NeedleKind>::words)
    if (word == o.task) task = with_kind(task, kind);
  // The default output folder is the run's, not the checkpoint's: `triad report` reads the grid there, and checkpoints
  // are deleted.
  std::filesystem::path folder = o.out;
  if (o.out.empty()) folder = std::filesystem::exists(o.checkpoint + "/config.json") ? o.checkpoint : source.folder;
  make_folders(folder.string());
  const std::string csv_path = (folder / needle_file(task.kind, "csv")).string(),
                    svg_path = (folder / needle_file(task.kind, "svg")).string();
  for (const std::string& path : {csv_path, svg_path}) {
    check_output_file("--out", path);
    std::error_code absent;
    if (std::filesystem::exists(std::filesystem::symlink_status(path, absent)) &&
        !is_own_run_file(folder.string(), std::filesystem::path(path).filename().string()))
      fail("{} is not of `triad eval --needle`: move it, or choose another --out", path);
  }
  std::unique_ptr<LoadedModel> loaded;  // the model, allocated for the current length
  const NeedleGrid grid = measure_needles(
      task, o.questions, [&](std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t T) {
        if (!loaded || loaded->activations().T() != T) {
          loaded.reset();
          loaded = std::make_unique<LoadedModel>(
              // The same checkpoint for all lengths, although a newer one may appear.
              LoadedModel::Options{.checkpoint = source.weights,
                                   .device = parse_device(o.device),
                                   .dtype = parse_dtype(o.dtype),
                                   .batch = o.questions.batch,
                                   .seq_len = T});
        }
        return answers_of(*loaded, tokens, targets);
      });
  const std::string attention(word_of(source.config.model.attention));
  if (o.json) {
    Json cells = Json::array();
    for (size_t l = 0; l < grid.lengths.size(); ++l)
      for (size_t d = 0; d < grid.depths.size(); ++d)
        cells.push_back({{"length", grid.lengths[l]}, {"depth", grid.depths[d]}, {"accuracy", grid.accuracy(d, l)}});
    Json result = {{"task", word_of(task.kind)}, {"attention", attention},    {"samples", grid.samples},
                   {"lowest", grid.lowest()},    {"overall", grid.overall()}, {"cells", cells}};
    if (grid.pairs > 0) result["pairs"] = grid.pairs;
    fmt::print("{}\n", dump_json(result, -1));
  } else {
    fmt::print("accuracy, task: {}, attention: {}, {} a cell{}\n{}lowest {:.1f}%, overall {:.1f}%; {}\n",
               word_of(task.kind), attention, counted(grid.samples, "sequence"), grid.pairs_text(), grid.table(),
               100 * grid.lowest(), 100 * grid.overall(), svg_path);
  }
  std::fflush(stdout);
  write_file_atomically(csv_path, grid.csv());
  write_file_atomically(svg_path, grid.svg(needle_title(task.kind, attention)));
}

}  // namespace triad
