#include "train/memory_plan.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "engine/check.h"
#include "kernels/ops/matmul.h"
#include "model/flops.h"
#include "train/monitor/memory_report.h"
#include "train/train_step.h"

namespace triad {

namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// A recompute setting that fit_recompute tries, in the order of FLOPs: the first k layers recompute one stage, or the
// first k layers recompute the whole block and the others their MLP.
struct Candidate {
  std::string text;
  double flops;
};
std::vector<Candidate> recompute_candidates(const Config& c, const DocumentMix& mix) {
  const int64_t L = c.model.n_layers;
  std::vector<Candidate> all;
  const auto add = [&](const RecomputePlan& plan) {
    double flops = 0;
    for (int64_t i = 0; i < L; ++i)
      flops +=
          replay_flops(c.model, c.model.attention_of(i), c.train.micro_batch_size, c.train.seq_len, plan.of(i), mix);
    all.push_back({plan.str(), flops});
  };
  add({});
  for (int64_t k = 1; k <= L; ++k) {
    for (const Recompute stage : {Recompute::mlp, Recompute::attention, Recompute::block}) {
      RecomputePlan plan;
      plan.set(0, k, stage);
      add(plan);
    }
    RecomputePlan both;
    both.set(0, k, Recompute::block);
    both.set(k, L, Recompute::mlp);
    if (k < L) add(both);
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.flops < b.flops; });
  return all;
}

// Upper limits of a plan. Kernels index rows with 32 bits; kMostParameters is beyond any machine's memory and bounds
// the time that planning takes.
constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max(), kMostParameters = int64_t{1} << 40;

// Throws if the product of individually valid sizes overflows or is impossibly large.
void check_sizes(const Config& config, const Comm* comm) {
  const TrainConfig& t = config.train;
  const int64_t tokens = t.micro_batch_size * t.seq_len, parameters = count_parameters(config.model);
  if (tokens > kMostTokens)
    fail_usage("train.micro_batch_size is {} and train.seq_len {}: a micro-step of {} tokens; at most {} are possible",
               t.micro_batch_size, t.seq_len, tokens, kMostTokens);
  int64_t of_all = 0;
  const int64_t ranks = comm == nullptr ? 1 : comm->world();
  if (__builtin_mul_overflow(t.tokens_per_step(), ranks, &of_all))
    fail_usage(
        "train.micro_batch_size {}, train.seq_len {} and train.accumulate_grad_batches {} on {} ranks: a step of more "
        "than 2^63 tokens",
        t.micro_batch_size, t.seq_len, t.accumulate_grad_batches, ranks);
  if (parameters > kMostParameters)
    fail_usage(
        "model.dim is {}, model.n_layers {}, model.vocab_size {}: a model of {} parameters; at most {} are possible",
        config.model.dim, config.model.n_layers, config.model.vocab_size, parameters, kMostParameters);
}

// Config changes that make the run fit into memory, as text for an error message.
std::string advice(const Config& config, Device device, int64_t bytes, Comm* comm, int64_t most_documents) {
  std::string fits;
  if (const std::optional<RecomputeFit> fit = fit_recompute(config, device, bytes, comm, most_documents))
    fits += fmt::format("runtime.recompute \"{}\" ({:.0f} MiB)", fit->recompute,
                        static_cast<double>(fit->plan.peak_bytes()) / kMiB);
  if (const std::optional<BatchFit> fit = fit_batch(config, device, bytes, comm, most_documents))
    fits += fmt::format("{}train.micro_batch_size {} ({:.0f} MiB)", fits.empty() ? "" : ", or ", fit->micro_batch_size,
                        static_cast<double>(fit->plan.peak_bytes()) / kMiB);
  if (fits.empty()) return "lower train.seq_len or the model's size: not even one sequence fits";
  return "this fits: " + fits;
}

// Bytes that a run leaves unused: on a GPU for the code of kernels, which the driver loads when they first run; on a
// host for threads and batches.
int64_t left_free(int64_t free_bytes) { return std::min<int64_t>(int64_t{256} << 20, free_bytes); }

// Builds the error for a run that does not fit. Lays out the planned memory, scratch first, then tensor after tensor,
// to find the first tensor that does not fit.
PlanTooLarge too_large(const Config& config, Device device, Comm* comm, int64_t most_documents, const DeviceInfo& info,
                       int64_t room) {
  MemorySnapshot s;
  const MemoryPlan plan = plan_memory(config, device, comm, most_documents, &s.blocks);
  s.when = "oom";
  s.device = device;
  s.planned = true;
  s.time_us = now_us();
  s.address = uint64_t{1} << 40;
  s.scratch_bytes = align_up(plan.scratch_bytes);
  s.arena_bytes = plan.arena_bytes;
  if (plan.workspace_bytes > 0) s.outside.push_back({"matrix library's workspace", plan.workspace_bytes});
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / kMiB; };

  int64_t left = room - plan.workspace_bytes;
  std::string tensor = fmt::format("scratch memory of {:.2f} MiB", mib(s.scratch_bytes));
  int64_t asked = s.scratch_bytes;
  bool found = s.scratch_bytes > left;
  if (!found) left -= s.scratch_bytes;
  for (MemorySnapshot::Block& b : s.blocks) {
    b.offset += s.scratch_bytes;
    if (found) continue;
    found = b.padded_bytes > left;
    if (!found) {
      left -= b.padded_bytes;
      continue;
    }
    const std::string layer = layer_of(b.name);
    tensor = fmt::format("{} {}{} of {:.2f} MiB ({}{})", b.name, name_of(b.dtype), b.shape.str(), mib(b.bytes),
                         b.category, layer.empty() ? "" : ", " + layer);
    asked = b.padded_bytes;
  }
  s.oom = {asked, left, fmt::format("{} finds {:.2f} MiB left", tensor, mib(left))};
  std::string message = fmt::format(
      "out of memory: {}. This run needs {:.0f} MiB on {}, {:.0f} of its {:.0f} MiB are free: train.micro_batch_size "
      "is {}, train.seq_len {}; {}\n{}",
      s.oom->what, mib(plan.peak_bytes()), device.str(), mib(room), mib(info.memory_bytes),
      config.train.micro_batch_size, config.train.seq_len, advice(config, device, room, comm, most_documents),
      memory_by_name(s));
  message.pop_back();  // removes the last newline
  return PlanTooLarge(std::move(s), message);
}

}  // namespace

MemoryPlan plan_memory(const Config& config, Device device, Comm* comm, int64_t most_documents,
                       std::vector<MemorySnapshot::Block>* blocks) {
  check_sizes(config, comm);
  Runtime runtime({.device = device,
                   .planning = true,
                   .deterministic = config.runtime.deterministic,
                   .kernels = config.runtime.kernels,
                   .strict = config.runtime.strict});
  TrainStep step(runtime, config, comm, most_documents);
  // With several ranks the last micro-step also queues collectives, so all micro-steps are planned.
  const bool alone = comm == nullptr || comm->world() == 1;
  for (int64_t i = 0; i < (alone ? 1 : config.train.accumulate_grad_batches); ++i) step.micro_step({}, {}, 1);
  step.finish(0, 1);
  step.evaluate({}, {});
  MemoryPlan plan;
  plan.scratch_bytes = runtime.scratch().peak_bytes();
  plan.arena_bytes = runtime.arena().used_bytes() + align_up(plan.scratch_bytes);
  plan.workspace_bytes = device.is_cuda() ? kMatmulWorkspaceBytes : 0;
  plan.report = runtime.arena().report();
  if (blocks != nullptr) *blocks = name_blocks(runtime.arena(), step);
  return plan;
}

std::optional<BatchFit> fit_batch(Config config, Device device, int64_t bytes, Comm* comm, int64_t most_documents) {
  const auto plan_of = [&](int64_t batch) {
    config.train.micro_batch_size = batch;
    return plan_memory(config, device, comm, most_documents);
  };
  if (plan_of(1).peak_bytes() > bytes) return std::nullopt;
  // The largest batch that the range of train.micro_batch_size and the kernels allow.
  const int64_t most =
      std::min({int64_t{1} << 20, kMostTokens / config.train.seq_len, most_sequences(device, config.model)});
  int64_t fits = 1, too_many = 2;
  while (too_many <= most && plan_of(too_many).peak_bytes() <= bytes) fits = too_many, too_many *= 2;
  too_many = std::min(too_many, most + 1);
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (plan_of(middle).peak_bytes() <= bytes ? fits : too_many) = middle;
  }
  return BatchFit{fits, plan_of(fits)};
}

std::optional<RecomputeFit> fit_recompute(Config config, Device device, int64_t bytes, Comm* comm,
                                          int64_t most_documents, const DocumentMix& mix) {
  const TrainConfig& t = config.train;
  const double kept = training_flops(config.model, t.micro_batch_size, t.seq_len, {}, mix);
  for (const Candidate& candidate : recompute_candidates(config, mix)) {
    config.runtime.recompute = candidate.text;
    config.resolve();
    MemoryPlan plan = plan_memory(config, device, comm, most_documents);
    if (plan.peak_bytes() <= bytes) return RecomputeFit{candidate.text, candidate.flops / kept, std::move(plan)};
  }
  return std::nullopt;
}

std::unique_ptr<Runtime> allocate_planned(const Config& config, Device device, Comm* comm, int64_t most_documents,
                                          StartTimes* times) {
  const MemoryPlan plan = plan_memory(config, device, comm, most_documents);
  if (times != nullptr) times->ends("plan");
  if (!device.is_cuda()) allocate_matmul_buffers();
  const DeviceInfo info = backend::info(device);
  const int64_t room = info.free_bytes - left_free(info.free_bytes);
  if (plan.peak_bytes() > room) throw too_large(config, device, comm, most_documents, info, room);
  try {
    return std::make_unique<Runtime>(Runtime::Options{.device = device,
                                                      .arena_bytes = plan.arena_bytes,
                                                      .scratch_bytes = plan.scratch_bytes,
                                                      .deterministic = config.runtime.deterministic,
                                                      .kernels = config.runtime.kernels,
                                                      .strict = config.runtime.strict});
  } catch (const OutOfMemory& e) {  // another process allocated memory after backend::info
    throw too_large(config, device, comm, most_documents, info, e.free);
  }
}

}  // namespace triad
