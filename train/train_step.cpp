#include "train/train_step.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "engine/check.h"
#include "kernels/matmul.h"
#include "kernels/reduce.h"
#include "kernels/verdict.h"

namespace triad {

namespace {

constexpr size_t kBatchSlots = 4;  // micro-batches that may be on their way up

Tensor make_parts(Context& ctx, Arena& arena, const Params& params) {
  const Tensor parts = arena.alloc(MemTag::workspace, "gradient parts", DType::i64, {params.count(), 2});
  std::vector<int64_t> host;
  for (int64_t i = 0; i < params.count(); ++i) {
    host.push_back(params.offset(i));
    host.push_back(params.specs()[static_cast<size_t>(i)].shape.numel());
  }
  write(ctx, parts, host.data());
  return parts;
}

}  // namespace

TrainStep::TrainStep(Runtime& runtime, const Config& config)
    : runtime_(runtime),
      ctx_(runtime.ctx()),
      config_(config),
      model_(ctx_, runtime.arena(), config.model,
             {.dtype = compute_dtype(config.runtime.precision), .training = true, .max_seq_len = config.train.seq_len}),
      optimizer_(ctx_, runtime.arena(), model_.params()),
      act_(runtime.arena(), config.model, config.train.micro_batch_size, config.train.seq_len, model_.dtype(), true,
           config.recompute()),
      numbers_(runtime.arena().alloc(MemTag::workspace, "step numbers", DType::f64, {StepNumbers::count})),
      eval_loss_(runtime.arena().alloc(MemTag::workspace, "evaluation loss", DType::f64, {1})),
      parts_(make_parts(ctx_, runtime.arena(), model_.params())),
      first_(ctx_.device),
      later_(ctx_.device) {
  zero(ctx_, numbers_);
  zero(ctx_, model_.params().grads());  // the padding between them, too, which no op writes
  if (ctx_.planning) return;
  const int64_t batch_bytes = act_.tokens.bytes() + act_.targets.bytes();
  for (size_t i = 0; i < kBatchSlots; ++i) batches_.emplace_back(ctx_.device, batch_bytes);
  for (size_t i = 0; i < kMaxQueued; ++i) results_.emplace_back(ctx_.device, numbers_.bytes());
}

void TrainStep::begin() {
  begun_ = true;
  zero(ctx_, model_.params().added_grads());
  zero(ctx_, numbers_.slice(0, StepNumbers::loss, StepNumbers::loss + 1));
}

void TrainStep::upload(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
  if (ctx_.planning) return;
  Slot& slot = batches_[next_batch_];
  next_batch_ = (next_batch_ + 1) % batches_.size();
  slot.done.synchronize();  // the device has long taken what was here four micro-steps ago
  std::byte* at = slot.memory.data();
  const auto put = [&](Tensor to, std::span<const int32_t> from) {
    TRIAD_CHECK(static_cast<int64_t>(from.size()) == to.numel(), "a batch of {} tokens for {}", from.size(), to.str());
    std::memcpy(at, from.data(), from.size_bytes());
    backend::copy(to.data, to.device, at, Device::cpu(), to.bytes(), ctx_.stream.handle());
    at += to.bytes();
  };
  put(act_.tokens, tokens);
  put(act_.targets, targets);
  slot.done.record(ctx_.stream);
}

void TrainStep::forward_backward(int64_t step_positions, bool first) {
  model_.forward(ctx_, act_);
  model_.loss_and_backward(ctx_, act_, 1.0 / static_cast<double>(step_positions), first);
  sum(ctx_, numbers_.slice(0, StepNumbers::loss, StepNumbers::loss + 1), act_.row_loss, /*add=*/true);
}

void TrainStep::micro_step(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t step_positions) {
  upload(tokens, targets);
  const bool with_graph = config_.runtime.cuda_graph && ctx_.device.is_cuda() && !ctx_.planning;
  const bool first = std::exchange(begun_, false);
  Recording& recording = first ? first_ : later_;
  if (!with_graph || recording.step_positions != step_positions) {  // once without: loads kernels, chooses algorithms
    recording.graph.clear();
    recording.step_positions = step_positions;
    return forward_backward(step_positions, first);
  }
  if (!recording.graph.recorded()) recording.graph.record(ctx_, [&] { forward_backward(step_positions, first); });
  recording.graph.launch(ctx_.stream);
}

void TrainStep::update(int64_t step, int64_t step_positions) {
  const auto number = [&](int64_t i) { return numbers_.slice(0, i, i + 1); };
  const Tensor grads = model_.params().grads();
  sum_of_squares(ctx_, number(StepNumbers::norm_squared), grads);
  judge_step(ctx_, numbers_, grads, parts_, config_.train.on_nonfinite == OnNonfinite::stop);
  optimizer_.step(ctx_, model_.params(), number(StepNumbers::applied), config_.train, step);
  if (ctx_.planning) return;
  TRIAD_CHECK(queued_.size() < kMaxQueued, "{} steps are queued without a look at their results", queued_.size());
  Slot& slot = results_[next_result_];
  backend::copy(slot.memory.data(), Device::cpu(), numbers_.data, numbers_.device, numbers_.bytes(),
                ctx_.stream.handle());
  slot.done.record(ctx_.stream);
  queued_.push_back({next_result_, step_positions});
  next_result_ = (next_result_ + 1) % kMaxQueued;
}

TrainStep::Result TrainStep::result() {
  if (ctx_.planning) return {};
  TRIAD_CHECK(!queued_.empty(), "the result of a step was asked for, and none is queued");
  const Queued queued = queued_.front();
  queued_.pop_front();
  Slot& slot = results_[queued.slot];
  slot.done.synchronize();
  double numbers[StepNumbers::count];
  std::memcpy(numbers, slot.memory.data(), sizeof numbers);
  Result result;
  result.loss = numbers[StepNumbers::loss] / static_cast<double>(queued.step_positions);
  result.grad_norm = std::sqrt(numbers[StepNumbers::norm_squared]);
  result.finite = std::isfinite(result.loss) && std::isfinite(result.grad_norm);
  if (result.finite) return result;
  const auto bad = static_cast<int64_t>(numbers[StepNumbers::bad_part]);
  result.bad_tensor =
      bad < 0 ? "the loss" : "the gradient of " + model_.params().specs()[static_cast<size_t>(bad)].name;
  return result;
}

double TrainStep::evaluate(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
  upload(tokens, targets);
  model_.forward(ctx_, act_);
  model_.loss(ctx_, act_);
  sum(ctx_, eval_loss_, act_.row_loss);
  double loss = 0;
  read(ctx_, &loss, eval_loss_);
  return loss;
}

Device choose_device(DeviceChoice choice) {
  if (choice == DeviceChoice::cpu) return Device::cpu();
  if (backend::cuda_device_count() > 0) return Device::cuda();
  if (choice == DeviceChoice::cuda)
    fail("device cuda was asked for (runtime.device, --device), but {}", backend::why_no_cuda());
  return Device::cpu();
}

DType compute_dtype(Precision precision) { return precision == Precision::bf16 ? DType::bf16 : DType::f32; }

}  // namespace triad
