#include "train/run/evaluation.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "engine/process/progress.h"
#include "io/file.h"
#include "io/tokenizer/text_bytes.h"
#include "train/dist/bucket_plan.h"
#include "train/monitor/selection_sample.h"

namespace triad {

namespace {

void sample_selection(RunSetup& run, int64_t step) {
  if (!run.config.log.stats || !run.config.model.has_lists()) return;
  const Json sample = selection_sample(run.runtime->ctx(), run.step.activations(), run.config.model, step);
  try {
    run.folder.require();
    write_file_atomically(run.folder.file(kSelectionSample), dump_json(sample, -1) + "\n");
  } catch (const Error&) {
    // Lost during the evaluation: the other ranks are in it, and the trainer finds this before the next write.
    if (!run.folder.lost_after_failure()) throw;
  }
}

// The tokens of a batch in which a taught index is sampled: evenly spaced positions, in each sequence in turn.
std::vector<int32_t> tokens_to_sample(const Batch& batch, int64_t seq_len) {
  std::vector<int32_t> tokens;
  for (const int64_t t : sampled_queries(seq_len, IndexSample::kMostRows))
    tokens.push_back(static_cast<int32_t>(static_cast<int64_t>(tokens.size()) % batch.rows * seq_len + t));
  return tokens;
}

// Whether the targets' text is known: that of shards, if their tokenizer is.
bool knows_text(const RunSetup& run) {
  const DataConfig& data = run.config.data;
  return data.kind == DataKind::text ||
         (data.kind == DataKind::shards && !data.tokenizer.empty() && run.tokenizer->available());
}

}  // namespace

Evaluation evaluate(RunSetup& run, int64_t step) {
  report_stage(run.runtime->ctx(), Stage::evaluation);
  // The rows of the stage that the step before was in.
  const TrainStage stage = stage_at(run.config.train, std::max<int64_t>(0, step - 1));
  const TrainConfig t = in_stage(run.config, stage).train;
  run.step.enter(stage);
  const Mixture& data = run.data.val;
  const int64_t batches = count_validation_batches(data, t.seq_len, t.micro_batch_size, t.eval_batches);
  std::vector<double> losses(static_cast<size_t>(batches)), counts = losses, bytes = losses;
  const bool text = knows_text(run);
  // With dist.zero 3 every forward gathers weights from all ranks, and with dist.context ranks exchange keys and
  // values, so a rank group that has no batch left evaluates the last one again, and leaves it out.
  const int64_t context = run.config.dist.context, groups = run.comm->world() / context,
                group = run.comm->rank() / context;
  const bool together = has_weight_windows(run.config, run.comm->world()) || context > 1;
  Evaluation evaluation;
  for (int64_t first = 0; first < batches; first += groups) {
    const bool counts_here = first + group < batches;
    if (!counts_here && !together) continue;
    const int64_t i = std::min(first + group, batches - 1);
    const Batch batch = validation_batch(data, t.seq_len, t.micro_batch_size, i, run.data.within());
    const bool samples = run.comm->first() && i == 0 && counts_here;
    std::vector<int32_t> sampled;
    if (samples && run.step.samples_index()) sampled = tokens_to_sample(batch, t.seq_len);
    const double loss = run.step.evaluate(batch.tokens, batch.targets, batch.bounds,
                                          {sampled, stage.attention == StageAttention::dense});
    if (!counts_here) continue;
    losses[static_cast<size_t>(i)] = loss;
    if (run.comm->rank() % context == 0) {
      for (const int32_t target : batch.targets) counts[static_cast<size_t>(i)] += target >= 0;
      if (text) bytes[static_cast<size_t>(i)] = static_cast<double>(text_bytes(*run.tokenizer, batch.targets));
    }
    if (samples) sample_selection(run, step);
    if (!sampled.empty()) evaluation.index = run.step.index_recall();
  }
  run.comm->add(losses, "the evaluation's losses");
  run.comm->add(counts, "the evaluation's positions");
  const double nats = std::accumulate(losses.begin(), losses.end(), 0.0);
  evaluation.loss = nats / std::accumulate(counts.begin(), counts.end(), 0.0);
  if (text) {
    run.comm->add(bytes, "the evaluation's bytes");
    evaluation.bits_per_byte = bits_per_byte(nats, std::accumulate(bytes.begin(), bytes.end(), 0.0));
  }
  return evaluation;
}

}  // namespace triad
