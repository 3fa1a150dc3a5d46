#include "tools/eval_needle.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "engine/check.h"
#include "io/file.h"
#include "io/json_config.h"
#include "train/data_source.h"
#include "train/inference.h"

namespace triad {

namespace {

// The likeliest tokens of a model, whose batches are of B sequences, padded behind their ends where fewer came: what
// stands behind changes nothing before it.
std::vector<int32_t> answers_of(LoadedModel& loaded, std::span<const int32_t> tokens, std::span<const int32_t> targets) {
  const int64_t rows = loaded.activations().rows();
  std::vector<int32_t> padded(tokens.begin(), tokens.end());
  padded.resize(static_cast<size_t>(rows), 0);
  loaded.set_tokens(padded);
  loaded.model().forward(loaded.ctx(), loaded.activations());
  std::vector<int32_t> answers;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] < 0) continue;
    const std::vector<double> logits = loaded.logits(static_cast<int64_t>(i), 1);
    answers.push_back(static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  return answers;
}

// Of `count` sequences: those whose answers are all right.
int64_t count_right(std::span<const int32_t> targets, std::span<const int32_t> answers, int64_t count) {
  const auto length = static_cast<int64_t>(targets.size()) / count;
  int64_t right = 0, next = 0;
  for (int64_t s = 0; s < count; ++s) {
    bool all = true;
    for (int64_t i = s * length; i < (s + 1) * length; ++i)
      if (targets[i] >= 0) all = (answers[next++] == targets[i]) && all;
    right += all;
  }
  return right;
}

}  // namespace

NeedleGrid measure_needles(const NeedleTask& task, NeedleQuestions q, const Answers& answers) {
  if (q.lengths.empty()) q.lengths = {task.seq_len / 8, task.seq_len / 4, task.seq_len / 2, task.seq_len};
  const auto in_order = [](auto& list) {
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
  };
  in_order(q.lengths);
  in_order(q.depths);
  for (const int64_t length : q.lengths) needle_probe(task, length, 0, 0);  // what has no room is refused at once
  for (const double depth : q.depths) needle_probe(task, q.lengths.back(), depth, 0);
  NeedleGrid grid{.lengths = q.lengths, .depths = q.depths, .samples = q.samples, .right = {}};
  grid.right.assign(q.lengths.size() * q.depths.size(), 0);
  for (size_t l = 0; l < q.lengths.size(); ++l)
    for (size_t d = 0; d < q.depths.size(); ++d)
      for (int64_t begin = 0; begin < q.samples; begin += q.batch) {
        const int64_t count = std::min(q.batch, q.samples - begin);
        std::vector<int32_t> tokens, targets;
        for (int64_t s = begin; s < begin + count; ++s) {
          const NeedleProbe probe = needle_probe(task, q.lengths[l], q.depths[d], static_cast<uint64_t>(s));
          tokens.insert(tokens.end(), probe.tokens.begin(), probe.tokens.end());
          targets.insert(targets.end(), probe.targets.begin(), probe.targets.end());
        }
        grid.right[d * q.lengths.size() + l] += count_right(targets, answers(tokens, targets, q.lengths[l]), count);
      }
  return grid;
}

void eval_needle(const NeedleEval& o) {
  const ModelSource source = find_model(o.checkpoint);
  const NeedleTask task = needle_task(source.config);
  if (source.config.data.kind != DataKind::needle)
    fail_usage("--needle: {} was trained on data.kind {}, and no model knows the task that did not learn it: needle",
               o.checkpoint, word_of(source.config.data.kind));
  std::unique_ptr<LoadedModel> loaded;  // for one length at a time
  const NeedleGrid grid = measure_needles(
      task, o.questions, [&](std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t T) {
        if (!loaded || loaded->activations().T() != T) {
          loaded.reset();
          loaded = std::make_unique<LoadedModel>(LoadedModel::Options{.checkpoint = o.checkpoint,
                                                                      .device = parse_device(o.device),
                                                                      .dtype = parse_dtype(o.dtype),
                                                                      .batch = o.questions.batch,
                                                                      .seq_len = T});
        }
        return answers_of(*loaded, tokens, targets);
      });
  const std::filesystem::path folder = o.out.empty() ? source.folder : o.out;
  const std::string attention(word_of(source.config.model.attention));
  write_file_atomically((folder / kNeedleCsv).string(), grid.csv());
  write_file_atomically((folder / kNeedleSvg).string(), grid.svg("Needles recalled, attention: " + attention));
  if (o.json) {
    Json cells = Json::array();
    for (size_t l = 0; l < grid.lengths.size(); ++l)
      for (size_t d = 0; d < grid.depths.size(); ++d)
        cells.push_back({{"length", grid.lengths[l]}, {"depth", grid.depths[d]}, {"accuracy", grid.accuracy(d, l)}});
    fmt::print("{}\n", dump_json({{"attention", attention},
                                  {"samples", grid.samples},
                                  {"lowest", grid.lowest()},
                                  {"cells", cells}},
                                 -1));
  } else {
    fmt::print("accuracy, attention: {}, {} sequences a cell, {} keys in {} tokens\n{}lowest {:.1f}%; {}\n", attention,
               grid.samples, task.pairs, task.seq_len, grid.table(), 100 * grid.lowest(),
               (folder / kNeedleSvg).string());
  }
}

}  // namespace triad
