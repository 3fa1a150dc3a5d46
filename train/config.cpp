#include "train/config.h"

#include <limits>

#include "engine/check.h"
#include "io/tokenizer/tokenizer.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace {

std::unique_ptr<Tokenizer> named_tokenizer(const std::string& name) {
  try {
    return make_tokenizer(name);
  } catch (const UsageError& e) { fail_usage("data.tokenizer: {}", e.what()); }
}

// Throws for a value that is 0 or infinite as fp32: kernels receive it as fp32 and would silently train wrong.
void check_fp32(const char* key, double value) {
  constexpr double kLeast = std::numeric_limits<float>::min(), kMost = std::numeric_limits<float>::max();
  if (value != 0 && (value < kLeast || value > kMost))
    fail_usage("{} is {}: it is used in fp32, where 0 and {:.3g} to {:.3g} are allowed", key, value, kLeast, kMost);
}

}  // namespace

void Config::resolve() {
  model.resolve();
  check_fp32("model.init_std", model.init_std);
  check_fp32("model.norm_eps", model.norm_eps);
  check_fp32("nsa.gate_temperature", model.nsa.gate.temperature);
  check_fp32("train.lr", train.lr);
  check_fp32("train.eps", train.eps);
  check_fp32("train.weight_decay", train.weight_decay);
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
  } catch (const UsageError& e) { throw UsageError(shortened(e.what(), 1000)); }
}

void Config::check_run() const {
  const std::unique_ptr<Tokenizer> tokenizer = named_tokenizer(data.tokenizer_or_bytes());
  if (data.kind == DataKind::text && model.vocab_size < tokenizer->vocab_size())
    fail_usage("model.vocab_size is {}: the tokenizer {} needs at least {}", model.vocab_size, data.tokenizer,
               tokenizer->vocab_size());
  if ((data.kind == DataKind::text || data.kind == DataKind::shards) && data.paths.empty())
    fail_usage("data.paths is empty: data.kind {} needs files", word_of(data.kind));
  if (log.out_dir.empty()) fail_usage("log.out_dir is empty: the run's folder has to be named");
  if (runtime.precision == Precision::fp32) {
    constexpr const char* kNeedsBf16 = "it needs runtime.precision bf16, and that is fp32";
    if (train.master_dtype == MasterDType::none) fail_usage("train.master_dtype is none: {}", kNeedsBf16);
    if (train.grads_dtype == Precision::bf16) fail_usage("train.grads_dtype is bf16: {}", kNeedsBf16);
  }
  if (train.optimizer == OptimizerKind::muon && runtime.offload != Offload::none)
    fail_usage("train.optimizer is muon: it needs runtime.offload none, and that is {}", word_of(runtime.offload));
  const int64_t decay = train.schedule == Schedule::wsd ? train.decay_steps() : 0;
  if (decay > 0 && train.warmup_steps + decay > train.steps)
    fail_usage(
        "train.decay_fraction is {}: with train.schedule wsd, its {} steps and train.warmup_steps {} are more than "
        "train.steps {}",
        train.decay_fraction, decay, train.warmup_steps, train.steps);
  if (dist.context > train.seq_len)
    fail_usage("dist.context is {}: train.seq_len is {}, and each rank needs a token", dist.context, train.seq_len);
  if (dist.context > 1 && runtime.cuda_graph)
    fail_usage(
        "dist.context is {}: it must be 1 with runtime.cuda_graph, since a graph cannot hold what the ranks exchange",
        dist.context);
  constexpr int64_t kLongRun = 1000;
  if (train.steps > kLongRun && train.save_every == 0 && !train.allow_unsafe)
    fail_usage(
        "train.save_every is 0 in a run of {} steps: a crash would lose all of it. Set train.save_every, or "
        "train.allow_unsafe=true",
        train.steps);
}

}  // namespace triad
