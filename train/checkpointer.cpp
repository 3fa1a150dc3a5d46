#include "train/checkpointer.h"

#include <chrono>
#include <cstring>
#include <utility>

#include "engine/check.h"
#include "io/checkpoint.h"

namespace triad {

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

constexpr int64_t kBuffers = 3;  // fp32 copies of the parameters in a checkpoint: master weights, exp_avg, exp_avg_sq

}  // namespace

Checkpointer::Checkpointer(const Config& config, const Params& params, Device device, std::string parent,
                           std::vector<Tokenizer::File> tokenizer)
    : config_(config),
      params_(params),
      parent_(std::move(parent)),
      tokenizer_(std::move(tokenizer)),
      host_(device, kBuffers * params.stored_elements() * static_cast<int64_t>(sizeof(float))),
      copied_(device) {
  // Writes to every page of the staging memory now, because page faults would slow down the first save. Pinned memory
  // needs no such step.
  if (!device.is_cuda())
    std::memset(host_.data(), 0, static_cast<size_t>(kBuffers * params.stored_elements()) * sizeof(float));
}

Tensor Checkpointer::buffer(int64_t i) const {
  const int64_t n = params_.stored_elements();
  return Tensor(host_.data() + i * n * static_cast<int64_t>(sizeof(float)), DType::f32, {n}, Device::cpu());
}

void Checkpointer::save(Context& ctx, Optimizer& optimizer, const RunState& state) {
  TRIAD_CHECK(!writing_.valid(), "a checkpoint of step {} while another is being written", state.step);
  const Clock::time_point begin = Clock::now();
  for (int64_t i = 0; i < kBuffers; ++i)
    optimizer.gather(ctx, Optimizer::kStates[i], [&](const ElementRange& elements, const Tensor& values) {
      copy(ctx, buffer(i).slice(0, elements.begin, elements.end), values);
    });
  copied_.record(ctx.stream);
  stall_ms_ = seconds_since(begin) * 1e3;
  writing_ = std::async(std::launch::async, [this, state] {
    copied_.synchronize();
    const Clock::time_point begin_writing = Clock::now();
    const std::string folder =
        save_checkpoint(parent_, params_, {buffer(0), buffer(1), buffer(2)}, config_, state, tokenizer_);
    thin_out_checkpoints(parent_, config_.train.keep_last, config_.train.keep_every);
    return Written{folder, stall_ms_, seconds_since(begin_writing)};
  });
}

std::optional<Checkpointer::Written> Checkpointer::take(bool wait) {
  if (!writing_.valid()) return std::nullopt;
  if (!wait && writing_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return std::nullopt;
  return writing_.get();
}

}  // namespace triad
