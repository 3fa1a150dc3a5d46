#include "train/config/config.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <utility>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/text.h"
#include "io/tokenizer/tokenizer.h"
#include "model/layer_ranges.h"
#include "train/config/schedule.h"

namespace triad {

namespace {

// Throws for a value that is 0 or infinite as fp32: kernels receive it as fp32 and would silently train wrong.
void check_fp32(const char* key, double value) {
  constexpr double kLeast = std::numeric_limits<float>::min(), kMost = std::numeric_limits<float>::max();
  if (value != 0 && (value < kLeast || value > kMost))
    fail_usage("{} is {}: it is used in fp32, where 0 and {:.3g} to {:.3g} are allowed", key, value, kLeast, kMost);
}

// Throws a UsageError if train.stages is impossible.
void check_stages(const Config& c) {
  if (c.train.stages.empty()) return;
  const int64_t longest = c.train.longest_seq_len();
  for (const TrainStage& stage : stages_of(c.train)) {
    const std::string key = fmt::format("train.stages[{}]", stage.index);
    check_fp32((key + ".lr_factor times train.lr").c_str(), stage.lr_factor * c.train.lr);
    if (longest % stage.seq_len != 0)
      fail_usage("{}.seq_len is {}, which does not divide {}, the longest of all stages", key, stage.seq_len, longest);
    if (c.data.kind == DataKind::needle && stage.seq_len != c.train.seq_len)
      fail_usage("{}.seq_len is {}: with data.kind needle it must be train.seq_len, which is {}", key, stage.seq_len,
                 c.train.seq_len);
    if (c.data.packing == Packing::best_fit && stage.seq_len != c.train.seq_len)
      fail_usage("{}.seq_len is {}: with data.packing best_fit it must be train.seq_len, which is {}", key,
                 stage.seq_len, c.train.seq_len);
    const StageAttention attention = stage.attention;
    if (!c.model.has_nsa() && attention != StageAttention::configured && attention != StageAttention::dense)
      fail_usage("{}.attention is {}: it needs model.attention nsa, and that is dense", key, word_of(attention));
  }
  if (const int64_t steps = stages_of(c.train).back().end; c.train.steps != steps)
    fail_usage(
        "train.steps is {}, but the steps of train.stages are {} in all: they must be equal, or train.steps absent or "
        "null",
        c.train.steps, steps);
}

// Brings the components into the form in which others read them. Throws a UsageError if together they are impossible.
void resolve_components(DataConfig& data) {
  std::vector<DataComponent>& all = data.components;
  const auto has_weight = [](const DataComponent& component) { return component.weight > 0; };
  const auto with = std::find_if(all.begin(), all.end(), has_weight);
  const auto without = std::find_if_not(all.begin(), all.end(), has_weight);
  if (with != all.end() && without != all.end())
    fail_usage(
        "data.paths: {} has the weight {}, but {} has none: give each a weight, as in {{\"path\": ..., \"weight\": "
        "...}}, or none, and a share is that of the tokens",
        with->name(), with->weight, without->name());
  for (DataComponent& component : all)
    if (!component.val_paths.empty() && !data.val_paths.empty())
      fail_usage("data.val_paths is {}, and {} in data.paths has val_paths of its own: only one of them can be set",
                 shortened(data.val_paths.front()), component.name());
  if (all.size() != 1) return;
  all.front().weight = 0;  // its share is all, whatever the weight
  if (!all.front().val_paths.empty()) data.val_paths = std::exchange(all.front().val_paths, {});
}

// Which layers multiply in fp8; empty: none.
std::vector<bool> parse_fp8_layers(const RuntimeConfig& c, int64_t n_layers) {
  if (c.matmul_dtype != MatmulDType::fp8) {
    if (!c.fp8_exclude.empty())
      fail_usage("runtime.fp8_exclude is \"{}\": it needs runtime.matmul_dtype fp8, and that is {}",
                 shortened(c.fp8_exclude), word_of(c.matmul_dtype));
    return {};
  }
  if (c.kernels.matmul == KernelChoice::reference)
    fail_usage("runtime.matmul_dtype is fp8: runtime.kernels must not be reference for matmul, which is in fp32");
  std::vector<bool> layers(static_cast<size_t>(n_layers), true);
  if (c.fp8_exclude.empty()) return layers;
  constexpr std::string_view kKey = "runtime.fp8_exclude", kAllowed = "ranges of layers such as 0:1,15:16";
  for (const LayerRange& range : parse_layer_ranges(c.fp8_exclude, n_layers, kKey, kAllowed)) {
    if (!range.word.empty()) fail_usage("{} is \"{}\": {} is allowed", kKey, c.fp8_exclude, kAllowed);
    std::fill(layers.begin() + range.begin, layers.begin() + range.end, false);
  }
  return layers;
}

// Checks train.lora. train.init_from becomes absolute, since every reader of the run's checkpoints needs it.
void resolve_lora(Config& c) {
  if (!c.train.init_from.empty())
    c.train.init_from = std::filesystem::absolute(c.train.init_from).lexically_normal().string();
  check_fp32("train.lora.alpha", c.train.lora->alpha);
  check_lora(c.model, *c.train.lora);
  if (c.runtime.matmul_dtype == MatmulDType::fp8)
    fail_usage("train.lora is set: runtime.matmul_dtype must be bf16, and that is fp8");
  if (c.train.optimizer == OptimizerKind::muon)
    fail_usage("train.lora is set: train.optimizer must be adamw for its thin matrices, and that is muon");
  if (!c.log.samples.empty())
    fail_usage(
        "log.samples holds \"{}\": with train.lora the run writes no samples; triad generate does, from a checkpoint",
        shortened(c.log.samples.front()));
}

}  // namespace

std::string DataComponent::name() const {
  if (path.empty()) return "no path";
  return shortened(path.front()) + (path.size() > 1 ? fmt::format(" and {} more", path.size() - 1) : "");
}

std::vector<std::string> DataConfig::paths() const {
  std::vector<std::string> all;
  for (const DataComponent& component : components) all.insert(all.end(), component.path.begin(), component.path.end());
  return all;
}

int64_t TrainConfig::longest_seq_len() const {
  int64_t longest = stages.empty() ? seq_len : 0;
  for (const StageConfig& stage : stages) longest = std::max(longest, stage.seq_len > 0 ? stage.seq_len : seq_len);
  return longest;
}

std::vector<TrainStage> stages_of(const TrainConfig& c) {
  const auto or_else = [](int64_t value, int64_t otherwise) { return value > 0 ? value : otherwise; };
  std::vector<TrainStage> stages;
  for (const StageConfig& s : c.stages) {
    const int64_t begin = stages.empty() ? 0 : stages.back().end;
    stages.push_back({.index = stages.size(),
                      .begin = begin,
                      .end = begin + s.steps,
                      .seq_len = or_else(s.seq_len, c.seq_len),
                      .micro_batch_size = or_else(s.micro_batch_size, c.micro_batch_size),
                      .lr_factor = s.lr_factor,
                      .attention = s.attention});
  }
  if (stages.empty()) stages.push_back({.end = c.steps, .seq_len = c.seq_len, .micro_batch_size = c.micro_batch_size});
  return stages;
}

TrainStage stage_at(const TrainConfig& c, int64_t step) {
  const std::vector<TrainStage> stages = stages_of(c);
  for (const TrainStage& stage : stages)
    if (step < stage.end) return stage;
  return stages.back();
}

Config in_stage(const Config& config, const TrainStage& stage) {
  Config stage_config = config;
  stage_config.train.stages.clear();
  stage_config.train.seq_len = stage.seq_len;
  stage_config.train.micro_batch_size = stage.micro_batch_size;
  return stage_config;
}

std::string stage_text(const Config& config, const TrainStage& stage) {
  const bool says_attention = config.model.has_nsa() && stage.attention != StageAttention::configured;
  return fmt::format("stage {} of {}: {} of {} x {}{}{}", stage.index + 1, config.train.stages.size(),
                     stage.steps() == 1 ? fmt::format("step {}", stage.end)
                                        : fmt::format("steps {} to {}", stage.begin + 1, stage.end),
                     stage.micro_batch_size, counted(stage.seq_len, "token"),
                     stage.lr_factor != 1 ? fmt::format(", learning rate x {}", stage.lr_factor) : "",
                     says_attention ? fmt::format(", attention {}", word_of(stage.attention)) : "");
}

void Config::resolve() {
  if (!runtime.deterministic)
    fail_usage(
        "runtime.deterministic is false: results are always bitwise reproducible, and no op has a faster order of its "
        "sums. Leave the key out, or set it to true");
  if (model.vocab_size < 2) fail_usage("model.vocab_size is {}: at least 2 are needed", model.vocab_size);
  model.resolve();
  resolve_components(data);
  check_stages(*this);
  check_fp32("model.init_std", model.init_std);
  check_fp32("model.norm_eps", model.norm_eps);
  check_fp32("nsa.gate_temperature", model.nsa.gate.temperature);
  check_fp32("train.lr", train.lr);
  check_fp32("train.eps", train.eps);
  check_fp32("train.weight_decay", train.weight_decay);
  check_fp32("train.index_lr_factor times train.lr", train.index_lr_factor * train.lr);
  check_fp32("nsa.index_loss", model.nsa.index_loss);
  check_fp32("train.grad_clip", train.grad_clip);
  if (data.seed < 0) data.seed = train.seed;
  if (data.kind != DataKind::shards) data.tokenizer = data.tokenizer_or_bytes();
  for (const std::string& what : log.diagnostics)
    if (what != "ledger" && what != "layer_norms" && what != "backward" && what != "buckets")
      fail_usage("log.diagnostics holds \"{}\": ledger, layer_norms, backward and buckets are allowed",
                 shortened(what));
  if (data.needle_depth > -1 && data.needle_depth < 0)
    fail_usage("data.needle_depth is {}: a number in [0, 1], or -1, is needed", data.needle_depth);
  try {
    recompute = RecomputePlan::parse(runtime.recompute, model.n_layers);
    fp8_layers = parse_fp8_layers(runtime, model.n_layers);
  } catch (const UsageError& e) { throw UsageError(shortened(e.what(), 1000)); }
  if (train.lora) resolve_lora(*this);
  for (int64_t i = 0; i < model.n_layers && !model.qk_norm; ++i)
    if (recompute.of(i) == Recompute::pointwise)
      fail_usage("runtime.recompute is \"{}\": pointwise recomputes the norm of q and k, and model.qk_norm is false",
                 shortened(runtime.recompute));
}

std::unique_ptr<Tokenizer> open_tokenizer(const DataConfig& data) {
  try {
    return make_tokenizer(data.tokenizer_or_bytes(), {.separator = data.separator});
  } catch (const UsageError& e) { fail_usage("data.tokenizer: {}", e.what()); }
}

void Config::check_run() const {
  const std::unique_ptr<Tokenizer> tokenizer = open_tokenizer(data);
  if (data.kind == DataKind::text && model.vocab_size < tokenizer->vocab_size())
    fail_usage("model.vocab_size is {}: the tokenizer {} needs at least {}", model.vocab_size, data.tokenizer,
               tokenizer->vocab_size());
  if ((data.kind == DataKind::text || data.kind == DataKind::shards) && data.components.empty())
    fail_usage("data.paths is empty: data.kind {} needs files", word_of(data.kind));
  if (log.out_dir.empty()) fail_usage("log.out_dir is empty: the run's folder has to be named");
  if (!log.samples.empty() && train.eval_every == 0)
    fail_usage("log.samples has {}: they are continued at evaluations, and train.eval_every is 0",
               counted(log.samples.size(), "prompt"));
  if (!log.samples.empty() && (dist.context > 1 || dist.zero == 3))
    fail_usage("log.samples has {}: one rank needs all weights and whole sequences, and dist.{} is {}",
               counted(log.samples.size(), "prompt"), dist.context > 1 ? "context" : "zero",
               dist.context > 1 ? dist.context : dist.zero);
  if (runtime.precision == Precision::fp32) {
    constexpr const char* kNeedsBf16 = "it needs runtime.precision bf16, and that is fp32";
    if (train.master_dtype != MasterDType::fp32)
      fail_usage("train.master_dtype is {}: {}", word_of(train.master_dtype), kNeedsBf16);
    if (train.grads_dtype == Precision::bf16) fail_usage("train.grads_dtype is bf16: {}", kNeedsBf16);
  }
  if (train.optimizer == OptimizerKind::muon && runtime.offload != Offload::none)
    fail_usage("train.optimizer is muon: it needs runtime.offload none, and that is {}", word_of(runtime.offload));
  if (train.lora && train.init_from.empty())
    fail_usage("train.lora is set, but train.init_from, whose weights the adapters change, is empty");
  if (train.eval_every == 0 && (train.keep_best || train.patience > 0))
    fail_usage("{}: it needs evaluations, and train.eval_every is 0",
               train.keep_best ? "train.keep_best is true" : fmt::format("train.patience is {}", train.patience));
  const int64_t decay = train.schedule == Schedule::wsd ? train.decay_steps() : 0;
  if (decay > 0 && train.warmup_steps + decay > train.steps)
    fail_usage(
        "train.decay_fraction is {}: with train.schedule wsd, its {} steps and train.warmup_steps {} are more than "
        "train.steps {}",
        train.decay_fraction, decay, train.warmup_steps, train.steps);
  const std::vector<TrainStage> stages = stages_of(train);
  for (const TrainStage& stage : stages)
    if (dist.context > stage.seq_len)
      fail_usage("dist.context is {}: {}seq_len is {}, and each rank needs a token", dist.context,
                 train.stages.empty() ? "train." : fmt::format("train.stages[{}].", stage.index), stage.seq_len);
  if (stages.size() > 1 && runtime.asserts && runtime.cuda_graph)
    fail_usage(
        "runtime.asserts is true: with {} stages in train.stages runtime.cuda_graph must be false, since a graph does "
        "not say which stage's op has failed",
        stages.size());
  if (dist.replicas == 1 && dist.replicas_grad_dtype == Precision::bf16)
    fail_usage(
        "dist.replicas_grad_dtype is bf16, and dist.replicas is 1: no sum passes between replicas (dist.grad_dtype is "
        "for the sums within one)");
  constexpr int64_t kLongRun = 1000;
  if (train.steps > kLongRun && train.save_every == 0 && !train.allow_unsafe)
    fail_usage(
        "train.save_every is 0 in a run of {} steps: a crash would lose all of it. Set train.save_every, or "
        "train.allow_unsafe=true",
        train.steps);
}

}  // namespace triad
