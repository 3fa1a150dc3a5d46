#include "train/fit/step_time.h"

#include <algorithm>

#include "model/attention.h"
#include "model/params.h"
#include "train/dist/rank_groups.h"
#include "train/step/optimizer.h"

namespace triad {

namespace {

// FLOP/s of attention as shares of the products' rate, forward and backward together, for Hopper's kernels. The
// branches run side by side in a step, so a share is what a branch adds to the step's time, not its kernels' own rate.
struct AttentionShares {
  double cmp = 0.46, sel = 0.36, win = 0.42, dense = 0.48;
  // A taught index: scores of all keys; gradients, which gather listed keys. Fitted to 65,536 tokens; keys that exceed
  // L2, at 262,144 and more, cost more (tests/baselines/findings/select.md: 26% with select_every 16 at 1,048,576).
  double index_scores = 0.85, index_gradients = 0.08;
};
constexpr AttentionShares kAttention;
constexpr double kPortable = 0.65;  // the portable kernels' rate, as a share of Hopper's

// Bytes that kernels read and write. Per token, layer and unit of width: norms, rotations, gates, sums of branches,
// copies; with dense attention fewer.
constexpr double kLayerBytes = 88, kDenseLayerBytes = 53, kLayerBytesAgain = 29;  // again: in recomputed blocks
constexpr double kLogitBytes = 4.2;                                               // the loss, per token and word
constexpr double kActivationBytes = 12;   // bytes per hidden unit, where the activation is no part of a product
constexpr double kLayerSeconds = 1.5e-4;  // seconds per layer and micro-step
// The time of layers' products in fp8, casts included, as a share of bf16's. Fitted to Llama 1B and 8 layers of 8B on
// an H200 (model/FP8.md), whose linear layers took 0.67 and 0.62.
constexpr double kFp8Products = 0.65;
constexpr double kMuonProducts = 0.5;        // rate of Muon's products, as a share of the products' rate
constexpr double kCommunicationShown = 0.8;  // share of what ranks send that computation does not hide (two H100s)
constexpr double kHostLink = 55e9;           // bytes/s to and from the host's memory

bool uses_hopper_kernels(const Config& config, const Card& card) {
  const ModelConfig& m = config.model;
  const bool heads = (m.d_k == 64 && m.d_v == 64) || (m.d_v == 128 && (m.d_k == 128 || m.d_k == 192));
  const KernelChoice choice = config.runtime.kernels.sel;
  return card.compute_capability == 90 && heads && (choice == KernelChoice::automatic || choice == KernelChoice::fused);
}

double attention_seconds(const Config& config, const Card& card, const PartFlops& flops) {
  const AttentionShares& share = kAttention;
  const double products = flops.cmp / share.cmp + flops.sel / share.sel + flops.win / share.win +
                          flops.dense / share.dense + flops.index_scores / share.index_scores +
                          flops.index_gradients / share.index_gradients;
  return products / card.products / (uses_hopper_kernels(config, card) ? 1 : kPortable);
}

double memory_seconds(const Config& config, const Card& card, double tokens) {
  const ModelConfig& m = config.model;
  double bytes = kLogitBytes * static_cast<double>(m.vocab_size);
  const double width = static_cast<double>(m.dim + m.n_heads * (m.d_k + m.d_v) / 2) / 2;
  for (int64_t i = 0; i < m.n_layers; ++i) {
    bytes += width * (m.attention_of(i) == AttentionKind::dense ? kDenseLayerBytes : kLayerBytes);
    if (config.recompute.replays(i, LayerPart::attention)) bytes += width * kLayerBytesAgain;
    if (!uses_hopper_kernels(config, card))
      bytes += kActivationBytes * static_cast<double>(m.mlp_hidden * (m.mlp == MlpKind::silu ? 1 : 2));
  }
  return bytes * tokens / card.memory;
}

// Muon's products: 5 iterations for each matrix, of three products, one of which is of the smaller side.
double muon_flops(const ModelConfig& model) {
  double flops = 0;
  for (const ParamSpec& p : param_specs(model)) {
    if (!is_updated_by_muon(p, OptimizerKind::muon)) continue;
    const double rows = static_cast<double>(p.shape.dim[0]), all = static_cast<double>(p.shape.numel());
    const double least = std::min(rows, all / rows);
    flops += 5 * (4 * least * all + 2 * least * least * least);
  }
  return flops;
}

double update_seconds(const Config& config, const Card& card, int64_t ranks) {
  const TrainConfig& t = config.train;
  const auto size = [](Precision p) -> double { return p == Precision::bf16 ? 2 : 4; };
  const double parameters = static_cast<double>(count_parameters(config.model)),
               updated = parameters / static_cast<double>(shard_count(config, ranks));
  // Weights and masters, both moments, gradients, and gradients again for their norm.
  const double weights = t.master_dtype == MasterDType::fp32 ? 10 : t.master_dtype == MasterDType::split ? 8 : 4;
  double bytes = weights + 4 * size(t.moments_dtype) + 2 * size(t.grads_dtype), seconds = 0;
  if (t.optimizer == OptimizerKind::muon) {
    bytes -= 2 * size(t.moments_dtype);
    seconds =
        muon_flops(config.model) / (kMuonProducts * card.products) / static_cast<double>(shard_count(config, ranks));
  }
  const double again = static_cast<double>(t.accumulate_grad_batches - 1) * parameters * card.links.accumulate_bytes;
  seconds += (updated * bytes + again) / card.memory;
  if (config.runtime.offload == Offload::optimizer) seconds += updated * (4 + 2 * size(t.moments_dtype)) / kHostLink;
  return seconds;
}

}  // namespace

std::optional<StepTime> step_time(const Config& config, const Card& card, int64_t ranks, const DocumentMix& mix,
                                  int64_t exchanged) {
  if (config.runtime.precision != Precision::bf16 || config.train.lora) return std::nullopt;
  const TrainConfig& t = config.train;
  const auto micro_steps = static_cast<double>(t.accumulate_grad_batches),
             share = 1 / static_cast<double>(config.dist.context);
  const PartFlops flops = flops_by_part(config.model, t.micro_batch_size, t.seq_len, config.recompute, mix);
  const double tokens = static_cast<double>(t.micro_batch_size * t.seq_len) * share;
  StepTime time;
  const double fp8 = config.runtime.matmul_dtype == MatmulDType::fp8 ? kFp8Products : 1;
  time.products = micro_steps * share * (fp8 * flops.products.layers + flops.products.head) / card.products;
  time.attention = micro_steps * share * attention_seconds(config, card, flops);
  time.memory = micro_steps * memory_seconds(config, card, tokens);
  time.update = update_seconds(config, card, ranks);
  time.launches = micro_steps * kLayerSeconds * static_cast<double>(config.model.n_layers);
  if (ranks > 1) {
    const auto seconds = [&](bool last) {
      const BytesSent sent = bytes_sent(config, ranks, last);
      return sent.within / card.links.links(ranks_of_replica(config, ranks)) + sent.to_others / card.links.links(ranks);
    };
    const double exchange = static_cast<double>(exchanged) / card.links.links(config.dist.context);
    time.communication =
        kCommunicationShown * ((micro_steps - 1) * seconds(false) + seconds(true) + micro_steps * exchange);
  }
  return time;
}

std::optional<RunTime> run_time(const Config& config, const Card& card, int64_t ranks, int64_t done,
                                const std::vector<DocumentMix>& attended, int64_t exchanged) {
  RunTime run;
  for (const TrainStage& stage : stages_of(config.train)) {
    const int64_t steps = stage.end - std::max(stage.begin, done);
    Config its = in_stage(config, stage);
    const DocumentMix& mix = attended.at(static_cast<size_t>(stage.index));
    const std::optional<StepTime> configured = step_time(its, card, ranks, mix, exchanged);
    if (!configured) return std::nullopt;
    run.last_step = *configured;
    double seconds = configured->total();
    if (stage.has_dense_steps()) {
      its.model.attention = AttentionKind::dense;
      const StepTime dense = *step_time(its, card, ranks, mix, exchanged);
      if (stage.attention == StageAttention::dense) run.last_step = dense;
      seconds = stage.attention == StageAttention::dense ? dense.total() : (seconds + dense.total()) / 2;
    }
    if (steps <= 0) continue;
    run.seconds += seconds * static_cast<double>(steps);
    run.tokens += static_cast<double>(its.tokens_per_step(static_cast<int>(ranks)) * steps);
  }
  run.joules = run.seconds * card.watts * static_cast<double>(ranks);
  return run;
}

}  // namespace triad
