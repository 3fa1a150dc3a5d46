#include "train/fit/planned_exchanges.h"

#include <algorithm>
#include <numeric>

#include "engine/check.h"
#include "model/sequence/exchange_meter.h"
#include "train/step/train_step.h"

namespace triad {

namespace {

std::vector<ExchangeTotals> exchanges_of_rank(const Config& config, const PlannedDevice& device, Comm* comm,
                                              int64_t most_documents, int64_t rank) {
  Runtime runtime({.device = device, .planning = true});
  device.describe(runtime.ctx());
  TrainStep step(runtime, config, comm, most_documents, rank);
  ExchangeMeter meter(runtime.ctx(), *step.sequence_group());
  step.micro_step({}, {}, 1);
  return meter.totals();
}

std::vector<int64_t> ranks_to_plan(int64_t ranks) {
  constexpr int64_t kAll = 8;
  if (ranks > kAll) return {0, ranks / 2, ranks - 1};
  std::vector<int64_t> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), int64_t{0});
  return all;
}

}  // namespace

int64_t PlannedExchange::most_bytes() const {
  int64_t most = 0;
  for (const Bytes& bytes : ranks) most = std::max({most, bytes.sent, bytes.received});
  return most;
}

std::vector<PlannedExchange> plan_exchanges(const Config& config, const PlannedDevice& device, Comm* comm,
                                            int64_t most_documents) {
  std::vector<PlannedExchange> all;
  if (config.dist.context == 1) return all;
  Config micro_step = config;
  micro_step.train.accumulate_grad_batches = 1;
  for (const int64_t rank : ranks_to_plan(config.dist.context)) {
    const std::vector<ExchangeTotals> its = exchanges_of_rank(micro_step, device, comm, most_documents, rank);
    if (rank == 0)
      for (const ExchangeTotals& t : its)
        all.push_back({.kind = t.kind, .backward = t.backward, .layers = t.layers, .calls = t.calls, .ranks = {}});
    TRIAD_CHECK(its.size() == all.size(), "rank {} has {} kinds of exchanges, rank 0 {}", rank, its.size(), all.size());
    for (size_t i = 0; i < its.size(); ++i) all[i].ranks.push_back({rank, its[i].sent, its[i].received});
  }
  return all;
}

int64_t most_bytes(const std::vector<PlannedExchange>& exchanges) {
  int64_t bytes = 0;
  for (const PlannedExchange& e : exchanges) bytes += e.most_bytes();
  return bytes;
}

}  // namespace triad
