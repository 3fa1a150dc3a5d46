#include "train/fit/step_cost.h"

#include <algorithm>

#include "model/params.h"

namespace triad {

double bytes_sent(const Config& config, int64_t ranks, bool last) {
  if (ranks == 1) return 0;
  const auto size = [](Precision p) -> double { return p == Precision::bf16 ? 2 : 4; };
  const double elements =
      static_cast<double>(count_parameters(config.model)) * static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  const double gradients = elements * size(config.dist.grad_dtype), weights = elements * size(config.runtime.precision);
  switch (config.dist.zero) {
    case 0:
      return last ? 2 * gradients : 0;
    case 1:
      return last ? gradients + weights : 0;
    case 2:
      return gradients + (last ? weights : 0);
    default:
      return gradients + 2 * weights;
  }
}

StepCost step_cost(const Config& config, int64_t ranks, const DocumentMix& mix) {
  constexpr CardRates kRates = kH200Rates;
  const TrainConfig& t = config.train;
  const auto micro_steps = static_cast<double>(t.accumulate_grad_batches);
  const double tokens = static_cast<double>(t.tokens_per_step());
  const auto compute_s = [&](const RecomputePlan& plan) {
    return training_flops(config.model, t.micro_batch_size, t.seq_len, plan, mix) / kRates.flops;
  };
  const double kept = compute_s({}), all = compute_s(config.recompute);
  const auto shown_s = [&](bool last) {
    const double s = bytes_sent(config, ranks, last) / (ranks > kRates.host_ranks ? kRates.network : kRates.host);
    return std::max(kRates.shown * s, s - all / 2);
  };
  const double parameters = static_cast<double>(count_parameters(config.model));
  const double updated = parameters / static_cast<double>(config.dist.zero > 0 ? ranks : 1);
  const double overhead =
      micro_steps * kRates.layer_s * static_cast<double>(config.model.n_layers) +
      (parameters * kRates.accumulate_bytes * (micro_steps - 1) + updated * kRates.update_bytes) / kRates.memory;
  return {.compute = micro_steps * kept / tokens,
          .recompute = micro_steps * (all - kept) / tokens,
          .communication = ((micro_steps - 1) * shown_s(false) + shown_s(true)) / tokens,
          .overhead = overhead / tokens};
}

}  // namespace triad
