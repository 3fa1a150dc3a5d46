#include "train/fit/fit.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "engine/units.h"
#include "model/activations.h"

namespace triad {

namespace {

constexpr double kGB = 1e9;
// The most ranks that least_need tries.
constexpr int64_t kMostRanks = 1024;

int64_t ranks_of(const Comm* comm) { return comm == nullptr ? 1 : comm->world(); }

// A recompute setting to try. A family's members recompute more and more layers: the first k layers recompute one part,
// or the first k layers recompute the whole block and the others their MLP.
enum class Family { pointwise, mlp, attention, block, block_and_mlp };
struct Candidate {
  std::string text;
  double flops;
};
std::vector<Candidate> candidates(Family family, const Config& c, const DocumentMix& mix) {
  const int64_t layers = c.model.n_layers;
  std::vector<Candidate> all;
  for (int64_t k = 1; k <= layers; ++k) {
    RecomputePlan plan;
    if (family == Family::block_and_mlp) {
      if (k == layers) break;
      plan.set(k, layers, Recompute::mlp);
    }
    constexpr Recompute kStages[] = {Recompute::pointwise, Recompute::mlp, Recompute::attention, Recompute::block,
                                     Recompute::block};
    plan.set(0, k, kStages[static_cast<size_t>(family)]);
    all.push_back({plan.str(), replay_flops(c.model, c.train.micro_batch_size, c.train.seq_len, plan, mix)});
  }
  return all;
}

void set_recompute(Config& config, const std::string& text) {
  config.runtime.recompute = text;
  config.resolve();
}

struct Recomputed {
  Candidate candidate;
  MemoryPlan plan;
};
// The candidate with the fewest FLOPs that fits and for which `worth`, if given, is true; worth is false for all with
// more FLOPs than one for which it is false.
std::optional<Recomputed> cheapest_recompute(Config& config, int64_t bytes, const DocumentMix& mix,
                                             const std::function<MemoryPlan(const Config&)>& plan_of,
                                             const std::function<bool(const std::string&)>& worth = {}) {
  std::optional<Recomputed> best;
  const auto fits = [&](const Candidate& candidate) {
    set_recompute(config, candidate.text);
    MemoryPlan plan = plan_of(config);
    if (plan.peak_bytes() > bytes) return false;
    best = {candidate, std::move(plan)};
    return true;
  };
  const Candidate none{"none", 0};
  if ((worth && !worth(none.text)) || fits(none)) return best;
  if (!worth && !fits(candidates(Family::block, config, mix).back())) return std::nullopt;
  for (const Family family :
       {Family::block, Family::block_and_mlp, Family::mlp, Family::attention, Family::pointwise}) {
    if (family == Family::pointwise && !config.model.qk_norm) continue;
    const std::vector<Candidate> all = candidates(family, config, mix);
    // FLOPs do not fall within a family. Before end: cheaper than the best so far. Before some: does not fit.
    const auto cheaper = [&](const Candidate& c) {
      return (!best || c.flops < best->candidate.flops) && (!worth || worth(c.text));
    };
    auto some = all.begin(), end = std::partition_point(all.begin(), all.end(), cheaper);
    if (end == all.begin() || !fits(*(end - 1))) continue;
    for (--end; some != end;) {
      const auto middle = some + (end - some) / 2;
      if (fits(*middle))
        end = middle;
      else
        some = middle + 1;
    }
  }
  return best;
}

// The most sequences in a micro-step that train.micro_batch_size's range and the kernels allow.
int64_t most_in_micro_step(const Config& config, const PlannedDevice& device) {
  return std::min({int64_t{1} << 20, kMostTokens / config.train.seq_len, most_sequences(device, config.model)});
}

// Micro-batch sizes with which a step keeps its sequences, the largest first.
std::vector<int64_t> sizes_of(const Config& config, const PlannedDevice& device) {
  constexpr int64_t kMostMicroSteps = 1 << 20;  // most train.accumulate_grad_batches
  const int64_t sequences = config.train.micro_batch_size * config.train.accumulate_grad_batches;
  std::vector<int64_t> sizes;
  for (int64_t size = std::min(sequences, most_in_micro_step(config, device)); size >= 1; --size)
    if (sequences % size == 0 && sequences / size <= kMostMicroSteps) sizes.push_back(size);
  return sizes;
}

// dist.zero values to choose from.
std::vector<int64_t> zeros_of(const Config& config, int64_t ranks) {
  return ranks > 1 ? std::vector<int64_t>{0, 1, 2, 3} : std::vector{config.dist.zero};
}

// The settings with the least memory that fit_settings could choose, with their peak bytes.
struct Least {
  Config config;
  int64_t bytes = 0;
};
Least least_memory(Config config, const PlannedDevice& device, Comm* comm, int64_t most_documents) {
  TrainConfig& t = config.train;
  const int64_t sequences = t.micro_batch_size * t.accumulate_grad_batches;
  set_recompute(config, "block");
  std::optional<Least> least;
  // The smallest micro-batch, and the largest: a step with one micro-step lets activations use gradient memory.
  const std::vector<int64_t> sizes = sizes_of(config, device);
  for (const int64_t size : {sizes.back(), sizes.front()})
    for (const int64_t zero : zeros_of(config, ranks_of(comm))) {
      t.micro_batch_size = size;
      t.accumulate_grad_batches = sequences / size;
      config.dist.zero = zero;
      const int64_t bytes = plan_memory(config, device, comm, most_documents).peak_bytes();
      if (!least || bytes < least->bytes) least = {config, bytes};
    }
  return *least;
}

}  // namespace

std::optional<BatchFit> fit_batch(Config config, const PlannedDevice& device, int64_t bytes, Comm* comm,
                                  int64_t most_documents) {
  const auto plan_of = [&](int64_t batch) {
    config.train.micro_batch_size = batch;
    return plan_memory(config, device, comm, most_documents);
  };
  if (plan_of(1).peak_bytes() > bytes) return std::nullopt;
  const int64_t most = most_in_micro_step(config, device);
  int64_t fits = 1, too_many = 2;
  while (too_many <= most && plan_of(too_many).peak_bytes() <= bytes) fits = too_many, too_many *= 2;
  too_many = std::min(too_many, most + 1);
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (plan_of(middle).peak_bytes() <= bytes ? fits : too_many) = middle;
  }
  return BatchFit{fits, plan_of(fits)};
}

std::optional<RecomputeFit> fit_recompute(Config config, const PlannedDevice& device, int64_t bytes, Comm* comm,
                                          int64_t most_documents, const DocumentMix& mix) {
  const TrainConfig& t = config.train;
  const double kept = training_flops(config.model, t.micro_batch_size, t.seq_len, {}, mix);
  std::optional<Recomputed> found = cheapest_recompute(
      config, bytes, mix, [&](const Config& c) { return plan_memory(c, device, comm, most_documents); });
  if (!found) return std::nullopt;
  return RecomputeFit{found->candidate.text, found->candidate.flops / kept, std::move(found->plan)};
}

std::optional<ZeroFit> fit_zero(Config config, const PlannedDevice& device, int64_t bytes, Comm* comm,
                                int64_t most_documents) {
  for (const int64_t zero : zeros_of(config, ranks_of(comm))) {
    if (zero <= config.dist.zero) continue;
    Config with = config;
    with.dist.zero = zero;
    MemoryPlan plan = plan_memory(with, device, comm, most_documents);
    if (plan.peak_bytes() <= bytes) return ZeroFit{zero, std::move(plan)};
  }
  return std::nullopt;
}

std::optional<Settings> fit_settings(const Config& given, const PlannedDevice& device, int64_t bytes, Comm* comm,
                                     int64_t most_documents, const DocumentMix& mix) {
  const int64_t ranks = ranks_of(comm), sequences = given.train.micro_batch_size * given.train.accumulate_grad_batches;
  const auto plan_of = [&](const Config& c) { return plan_memory(c, device, comm, most_documents); };
  const auto with = [&](int64_t zero, int64_t batch, const std::string& recompute) {
    Config config = given;
    config.dist.zero = zero;
    config.train.micro_batch_size = batch;
    config.train.accumulate_grad_batches = sequences / batch;
    set_recompute(config, recompute);
    return config;
  };
  struct Choice {
    int64_t zero, batch;
    double least_cost;  // least cost, without recomputation
  };
  std::vector<Choice> choices;
  for (const int64_t zero : zeros_of(given, ranks))
    for (const int64_t batch : sizes_of(given, device))
      choices.push_back({zero, batch, step_cost(with(zero, batch, "none"), ranks, mix).total()});
  std::stable_sort(choices.begin(), choices.end(),
                   [](const auto& a, const auto& b) { return a.least_cost < b.least_cost; });

  std::optional<Settings> best;
  // By dist.zero: a micro-batch that doesn't fit even with whole blocks recomputed; nor do larger ones. The largest may
  // need less if it's the only one in its step (model/lent_grads.h), but it costs the least, so it comes first.
  std::array<int64_t, 4> too_large;
  too_large.fill(sequences + 1);
  for (const auto& [zero, batch, least_cost] : choices) {
    if (best && least_cost >= best->cost.total()) break;
    if (batch >= too_large[static_cast<size_t>(zero)]) continue;
    Config config = with(zero, batch, "block");
    if (plan_of(config).peak_bytes() > bytes) {
      too_large[static_cast<size_t>(zero)] = batch;
      continue;
    }
    const auto cost_of = [&](const std::string& recompute) {
      return step_cost(with(zero, batch, recompute), ranks, mix);
    };
    const auto cheaper = [&](const std::string& recompute) {
      return !best || cost_of(recompute).total() < best->cost.total();
    };
    if (std::optional<Recomputed> found = cheapest_recompute(config, bytes, mix, plan_of, cheaper)) {
      const std::string& recompute = found->candidate.text;
      best = {zero, batch, sequences / batch, recompute, cost_of(recompute), std::move(found->plan)};
    }
  }
  return best;
}

std::string arguments_of(const Settings& s, int64_t ranks) {
  return fmt::format(
      "{}--set runtime.recompute={} --set train.micro_batch_size={} --set train.accumulate_grad_batches={}",
      ranks > 1 ? fmt::format("--set dist.zero={} ", s.zero) : "", s.recompute, s.micro_batch_size,
      s.accumulate_grad_batches);
}

std::string fit_advice(const Config& config, const PlannedDevice& device, int64_t bytes, Comm* comm,
                       int64_t most_documents) {
  std::vector<std::string> fits;
  const auto add = [&](const std::string& setting, const MemoryPlan& plan) {
    fits.push_back(fmt::format("{} ({:.0f} MiB)", setting, static_cast<double>(plan.peak_bytes()) / kMiB));
  };
  if (const auto fit = fit_recompute(config, device, bytes, comm, most_documents))
    add(fmt::format("runtime.recompute \"{}\"", fit->recompute), fit->plan);
  const bool one_size = config.train.stages.empty();
  if (const auto fit = one_size ? fit_batch(config, device, bytes, comm, most_documents) : std::nullopt)
    add(fmt::format("train.micro_batch_size {}", fit->micro_batch_size), fit->plan);
  if (const auto fit = fit_zero(config, device, bytes, comm, most_documents))
    add(fmt::format("dist.zero {}", fit->zero), fit->plan);
  if (fits.empty() && one_size)
    if (const auto fit = fit_settings(config, device, bytes, comm, most_documents))
      add(arguments_of(*fit, ranks_of(comm)), fit->plan);
  if (!fits.empty()) return fmt::format("this fits: {}", fmt::join(fits, ", or "));
  if (!one_size) return "lower train.micro_batch_size or train.seq_len in train.stages";
  return "lower train.seq_len or the model's size: not even one sequence fits";
}

std::string least_need(const Config& given, const PlannedDevice& device, int64_t bytes, Comm* comm,
                       int64_t most_documents) {
  const int64_t ranks = ranks_of(comm);
  const Least least = least_memory(given, device, comm, most_documents);
  std::vector<std::string> less;
  const auto add = [&](const std::string& what, int64_t need) {
    if (need < least.bytes)
      less.push_back(
          fmt::format("{}: {:.3f} GB{}", what, static_cast<double>(need) / kGB, need <= bytes ? ", which fits" : ""));
  };
  const auto bytes_with = [&](const std::function<void(Config&)>& change, Config config) {
    change(config);
    return plan_memory(config, device, comm, most_documents).peak_bytes();
  };
  const bool bf16 = given.runtime.precision == Precision::bf16;
  struct Change {
    const char* what;
    std::function<void(Config&)> change;
    bool possible;
  };
  const Change changes[] = {
      {"train.moments_dtype=bf16", [](Config& c) { c.train.moments_dtype = Precision::bf16; }, true},
      {"train.grads_dtype=bf16", [](Config& c) { c.train.grads_dtype = Precision::bf16; }, bf16},
      {"train.master_dtype=none", [](Config& c) { c.train.master_dtype = MasterDType::none; }, bf16},
  };
  Config small = given;
  std::string together;  // `small`'s changes
  if (bf16)
    add("train.master_dtype=split",
        bytes_with([](Config& c) { c.train.master_dtype = MasterDType::split; }, least.config));
  for (const auto& [what, change, possible] : changes) {
    if (!possible) continue;
    add(what, bytes_with(change, least.config));
    change(small);
    together += (together.empty() ? "" : " ") + std::string(what);
  }
  if (bf16) add(together, least_memory(small, device, comm, most_documents).bytes);
  // On the CPU the optimizer's state is on the host anyway, and Muon's is always on the device.
  if (device.is_cuda() && given.train.optimizer == OptimizerKind::adamw) {
    const auto offload = [](Config& c) { c.runtime.offload = Offload::optimizer; };
    add("runtime.offload=optimizer", bytes_with(offload, least.config));
    offload(small);
    add(together + " runtime.offload=optimizer", least_memory(small, device, comm, most_documents).bytes);
  }
  for (int64_t more = 2; more <= kMostRanks; more *= 2) {
    if (more <= ranks || more % given.dist.replicas != 0 || more % given.dist.context != 0) continue;
    const std::unique_ptr<Comm> planned = make_planned_comm(static_cast<int>(more));
    const Least shared = least_memory(given, device, planned.get(), most_documents);
    if (shared.bytes > bytes) continue;
    add(fmt::format("{} ranks with dist.zero={}", more, shared.config.dist.zero), shared.bytes);
    break;
  }
  const TrainConfig& t = least.config.train;
  return fmt::format(
      "the least that this config needs{} is {:.3f} GB, with runtime.recompute=block "
      "train.micro_batch_size={} train.accumulate_grad_batches={}{}{}{}",
      ranks > 1 ? fmt::format(" on each of {} ranks", ranks) : "", static_cast<double>(least.bytes) / kGB,
      t.micro_batch_size, t.accumulate_grad_batches,
      ranks > 1 ? fmt::format(" dist.zero={}", least.config.dist.zero) : "", less.empty() ? "" : "; less with ",
      fmt::join(less, "; "));
}

}  // namespace triad
