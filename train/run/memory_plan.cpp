#include "train/run/memory_plan.h"

#include <algorithm>
#include <vector>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/units.h"
#include "kernels/ops/matmul.h"
#include "model/params.h"
#include "train/fit/fit.h"
#include "train/monitor/memory_report.h"
#include "train/step/train_step.h"

namespace triad {

namespace {

// Beyond any machine's memory; bounds the time that planning takes.
constexpr int64_t kMostParameters = int64_t{1} << 40;

// Throws if individually valid sizes multiply to one that overflows or is impossibly large.
void check_sizes(const Config& run_config, const TrainStage& stage, const Comm* comm) {
  const Config config = in_stage(run_config, stage);
  const TrainConfig& t = config.train;
  const int64_t tokens = t.micro_batch_size * t.seq_len, parameters = count_parameters(config.model);
  if (tokens > kMostTokens)
    fail_usage("train.micro_batch_size is {} and train.seq_len {}: a micro-step of {} tokens; at most {} are possible",
               t.micro_batch_size, t.seq_len, tokens, kMostTokens);
  int64_t all_tokens = 0;
  const int64_t ranks = comm == nullptr ? 1 : comm->world();
  if (__builtin_mul_overflow(t.tokens_per_step(), ranks, &all_tokens))
    fail_usage(
        "train.micro_batch_size {}, train.seq_len {} and train.accumulate_grad_batches {} on {} ranks: a step of more "
        "than 2^63 tokens",
        t.micro_batch_size, t.seq_len, t.accumulate_grad_batches, ranks);
  if (parameters > kMostParameters)
    fail_usage(
        "model.dim is {}, model.n_layers {}, model.vocab_size {}: a model of {} parameters; at most {} are possible",
        config.model.dim, config.model.n_layers, config.model.vocab_size, parameters, kMostParameters);
}

// Bytes that a run leaves unused: on a GPU for kernel code, which the driver loads when they first run; on a host for
// threads and batches.
int64_t left_free(int64_t free_bytes) { return std::min<int64_t>(int64_t{256} << 20, free_bytes); }

// What is free differs a little from start to start, so that a run which is told to fit gets less than all of it.
int64_t advised_room(int64_t room) { return room - std::min(room / 100, int64_t{64} << 20); }

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
      "is {}, train.seq_len {}{}; {}\n{}",
      s.oom->what, mib(plan.peak_bytes()), device.str(), mib(room), mib(info.memory_bytes),
      config.train.micro_batch_size, config.train.seq_len,
      config.train.stages.empty()
          ? ""
          : fmt::format(", with {} (train.stages)", counted(config.train.stages.size(), "stage")),
      fit_advice(config, device, advised_room(room), comm, most_documents), memory_by_name(s));
  message.pop_back();  // removes the last newline
  return PlanTooLarge(std::move(s), message);
}

}  // namespace

namespace {

// The plan for one rank in a group that shares sequences (dist.context).
MemoryPlan plan_of_rank(const Config& config, const PlannedDevice& device, Comm* comm, int64_t most_documents,
                        std::vector<MemorySnapshot::Block>* blocks, int64_t rank) {
  Runtime runtime(
      {.device = device, .planning = true, .kernels = config.runtime.kernels, .strict = config.runtime.strict});
  device.describe(runtime.ctx());
  Config short_step = config;
  short_step.train.accumulate_grad_batches = std::min<int64_t>(config.train.accumulate_grad_batches, 3);
  TrainStep step(runtime, short_step, comm, most_documents, rank);
  // With several ranks the last micro-step also queues collectives. Those between the first and the last are all equal.
  const bool alone = comm == nullptr || comm->world() == 1;
  for (const TrainStage& stage : stages_of(config.train)) {
    // In a stage that alternates, one step of each kind.
    for (int64_t at = stage.begin; at < stage.begin + (stage.attention == StageAttention::alternate ? 2 : 1); ++at) {
      step.begin(/*trace=*/false, at);
      for (int64_t i = 0; i < (alone ? 1 : short_step.train.accumulate_grad_batches); ++i) step.micro_step({}, {}, 1);
      step.finish(at, 1);
    }
    step.evaluate({}, {});
  }
  MemoryPlan plan;
  plan.scratch_bytes = runtime.scratch().peak_bytes();
  plan.arena_bytes = runtime.arena().used_bytes() + align_up(plan.scratch_bytes);
  plan.workspace_bytes = device.is_cuda() ? kMatmulWorkspaceBytes : 0;
  plan.report = runtime.arena().report();
  if (blocks != nullptr) *blocks = name_blocks(runtime.arena(), step);
  return plan;
}

}  // namespace

// All ranks get as much memory as the one that needs most. Ranks that share sequences see as many keys in all, but
// their two runs (spans of tokens) round scratch sizes up differently, so any rank may need the most.
MemoryPlan plan_memory(const Config& config, const PlannedDevice& device, Comm* comm, int64_t most_documents,
                       std::vector<MemorySnapshot::Block>* blocks) {
  for (const TrainStage& stage : stages_of(config.train)) check_sizes(config, stage, comm);
  MemoryPlan most = plan_of_rank(config, device, comm, most_documents, blocks, 0);
  for (int64_t rank = 1; rank < config.dist.context; ++rank) {
    MemoryPlan its = plan_of_rank(config, device, comm, most_documents, nullptr, rank);
    if (its.peak_bytes() > most.peak_bytes()) most = std::move(its);
  }
  return most;
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
                                                      .kernels = config.runtime.kernels,
                                                      .strict = config.runtime.strict});
  } catch (const OutOfMemory& e) {  // another process allocated memory after backend::info
    throw too_large(config, device, comm, most_documents, info, e.free);
  }
}

}  // namespace triad
