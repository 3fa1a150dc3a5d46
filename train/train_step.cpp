#include "train/train_step.h"

#include <cmath>

#include "engine/check.h"
#include "kernels/matmul.h"
#include "kernels/reduce.h"

namespace triad {

TrainStep::TrainStep(Runtime& runtime, const Config& config)
    : runtime_(runtime),
      ctx_(runtime.ctx()),
      config_(config),
      model_(ctx_, runtime.arena(), config.model,
             {.dtype = compute_dtype(config.runtime.precision), .training = true, .max_seq_len = config.train.seq_len}),
      optimizer_(ctx_, runtime.arena(), model_.params()),
      act_(runtime.arena(), config.model, config.train.micro_batch_size, config.train.seq_len, model_.dtype(), true),
      sums_(runtime.arena().alloc(MemTag::workspace, "step sums", DType::f64, {3})) {}

void TrainStep::begin() {
  zero(ctx_, model_.params().grads());
  zero(ctx_, sums_);
}

void TrainStep::upload(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
  if (ctx_.planning) return;
  auto put = [&](Tensor to, std::span<const int32_t> from) {
    TRIAD_CHECK(static_cast<int64_t>(from.size()) == to.numel(), "a batch of {} tokens for {}", from.size(), to.str());
    backend::copy(to.data, to.device, reinterpret_cast<const std::byte*>(from.data()), Device::cpu(), to.bytes(),
                  ctx_.stream.handle());
  };
  put(act_.tokens, tokens);
  put(act_.targets, targets);
}

void TrainStep::micro_step(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t step_positions) {
  upload(tokens, targets);
  model_.forward(ctx_, act_);
  model_.loss_and_backward(ctx_, act_, 1.0 / static_cast<double>(step_positions));
  sum(ctx_, sums_.slice(0, 0, 1), act_.row_loss, /*add=*/true);
}

TrainStep::Result TrainStep::finish(int64_t step, int64_t step_positions) {
  const Tensor norm_squared = sums_.slice(0, 1, 2);
  sum_of_squares(ctx_, norm_squared, model_.params().grads());
  double sums[3] = {};
  read(ctx_, sums, sums_);  // the step's one wait: whether to update depends on it
  Result result;
  result.loss = sums[0] / static_cast<double>(step_positions);
  result.grad_norm = std::sqrt(sums[1]);
  result.finite = std::isfinite(result.loss) && std::isfinite(result.grad_norm);
  if (result.finite) optimizer_.step(ctx_, model_.params(), norm_squared, config_.train, step);
  return result;
}

double TrainStep::evaluate(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
  upload(tokens, targets);
  model_.forward(ctx_, act_);
  model_.loss(ctx_, act_);
  sum(ctx_, sums_.slice(0, 2, 3), act_.row_loss);
  double loss = 0;
  read(ctx_, &loss, sums_.slice(0, 2, 3));
  return loss;
}

std::string TrainStep::first_bad_tensor() {
  const Params& params = model_.params();
  std::vector<float> host;
  for (int64_t i = 0; i < params.count(); ++i) {
    const Tensor grad = params.part(params.grads(), i);
    host.resize(static_cast<size_t>(grad.numel()));
    read(ctx_, host.data(), grad);
    for (const float g : host)
      if (!std::isfinite(g)) return "the gradient of " + params.specs()[i].name;
  }
  return "the loss";
}

Device choose_device(DeviceChoice choice) {
  if (choice == DeviceChoice::cpu) return Device::cpu();
  if (backend::cuda_device_count() > 0) return Device::cuda();
  if (choice == DeviceChoice::cuda)
    fail("device cuda was asked for (runtime.device, --device), but {}", backend::why_no_cuda());
  return Device::cpu();
}

DType compute_dtype(Precision precision) { return precision == Precision::bf16 ? DType::bf16 : DType::f32; }

MemoryPlan plan_memory(const Config& config, Device device) {
  Runtime runtime({.device = device, .planning = true});
  TrainStep step(runtime, config);
  step.micro_step({}, {}, 1);
  step.finish(0, 1);
  step.evaluate({}, {});
  MemoryPlan plan;
  plan.scratch_bytes = runtime.scratch().peak_bytes();
  plan.arena_bytes = runtime.arena().used_bytes() + align_up(plan.scratch_bytes);
  plan.report = runtime.arena().report();
  return plan;
}

std::unique_ptr<Runtime> allocate_planned(const Config& config, Device device) {
  constexpr double kMiB = 1024.0 * 1024.0;
  const MemoryPlan plan = plan_memory(config, device);
  const DeviceInfo info = backend::info(device);
  const int64_t needed = plan.arena_bytes + (device.is_cuda() ? kMatmulWorkspaceBytes : 0);
  if (needed > info.free_bytes)
    fail(
        "this run needs {:.0f} MiB on {}, {:.0f} of its {:.0f} MiB are free: lower train.micro_batch_size ({}) or "
        "train.seq_len ({})\nscratch {:.2f} MiB, {}",
        needed / kMiB, device.str(), info.free_bytes / kMiB, info.memory_bytes / kMiB, config.train.micro_batch_size,
        config.train.seq_len, plan.scratch_bytes / kMiB, plan.report);
  return std::make_unique<Runtime>(
      Runtime::Options{.device = device, .arena_bytes = plan.arena_bytes, .scratch_bytes = plan.scratch_bytes});
}

}  // namespace triad
