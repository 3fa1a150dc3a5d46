#include "train/fit/step_cost.h"

#include <algorithm>

#include "model/attention.h"
#include "model/params.h"
#include "train/dist/rank_groups.h"

namespace triad {

namespace {

// The part of `s` seconds of communication that doesn't overlap with `compute` seconds.
double shown(double s, double compute) { return std::max(kH200Rates.shown * s, s - compute / 2); }

}  // namespace

double StepCost::exchange_shown() const { return shown(exchange, compute + recompute); }

BytesSent bytes_sent(const Config& config, int64_t ranks, bool last) {
  const int64_t replica_ranks = ranks_of_replica(config, ranks);
  const auto size = [](Precision p) -> double { return p == Precision::bf16 ? 2 : 4; };
  // The fraction of a total, divided among n ranks, that the others have.
  const auto others_share = [](int64_t n) { return static_cast<double>(n - 1) / static_cast<double>(n); };
  const double parameters = static_cast<double>(count_parameters(config.model)),
               elements = parameters * others_share(replica_ranks),
               to_others =
                   2 * parameters / static_cast<double>(replica_ranks) * others_share(ranks / replica_ranks) * 4;
  const double gradients = elements * size(config.dist.grad_dtype), weights = elements * size(config.runtime.precision);
  switch (config.dist.zero) {
    case 0:
      return last ? BytesSent{2 * gradients, to_others} : BytesSent{};
    case 1:
      return last ? BytesSent{gradients + weights, to_others} : BytesSent{};
    case 2:
      return {gradients + (last ? weights : 0), to_others};
    default:
      return {gradients + 2 * weights, to_others};
  }
}

namespace {

// Bytes that recomputing q and k alone moves in a micro-step: norm and rotation each read and write them all.
double pointwise_bytes(const Config& config) {
  const ModelConfig& c = config.model;
  const RecomputePlan& plan = config.recompute;
  int64_t width = 0;
  for (int64_t i = 0; i < c.n_layers && c.qk_norm; ++i)
    if (plan.replays(i, LayerPart::qk) && !plan.replays(i, LayerPart::attention))
      width += qk_width(c, c.attention_of(i));
  const int64_t element = config.runtime.precision == Precision::bf16 ? 2 : 4;
  return static_cast<double>(4 * element * width) *
         static_cast<double>(config.train.micro_batch_size * config.train.seq_len) /
         static_cast<double>(config.dist.context);
}

}  // namespace

StepCost step_cost(const Config& config, int64_t ranks, const DocumentMix& mix, int64_t exchanged) {
  constexpr CardRates kRates = kH200Rates;
  const TrainConfig& t = config.train;
  const auto micro_steps = static_cast<double>(t.accumulate_grad_batches);
  const double tokens = static_cast<double>(t.tokens_per_step()) / static_cast<double>(config.dist.context);
  const auto compute_s = [&](const RecomputePlan& plan) {
    return training_flops(config.model, t.micro_batch_size, t.seq_len, plan, mix) / kRates.flops /
           static_cast<double>(config.dist.context);
  };
  const double kept = compute_s({}), all = compute_s(config.recompute);
  const auto shown_s = [&](bool last) {
    const BytesSent sent = bytes_sent(config, ranks, last);
    const double s = sent.within / kRates.links(ranks_of_replica(config, ranks)) + sent.to_others / kRates.links(ranks);
    return shown(s, all);
  };
  const double parameters = static_cast<double>(count_parameters(config.model));
  const double updated = parameters / static_cast<double>(shard_count(config, ranks));
  const double overhead =
      micro_steps * kRates.layer_s * static_cast<double>(config.model.n_layers) +
      (parameters * kRates.accumulate_bytes * (micro_steps - 1) + updated * kRates.update_bytes) / kRates.memory;
  return {.compute = micro_steps * kept / tokens,
          .recompute = micro_steps * (all - kept + pointwise_bytes(config) / kRates.memory) / tokens,
          .communication = ((micro_steps - 1) * shown_s(false) + shown_s(true)) / tokens,
          .exchange = micro_steps * static_cast<double>(exchanged) / kRates.links(config.dist.context) / tokens,
          .overhead = overhead / tokens};
}

}  // namespace triad
