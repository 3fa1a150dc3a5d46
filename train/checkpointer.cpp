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

// Bytes of the optimizer's states, each in its dtype.
int64_t staging_bytes(const Config& config, const Params& params) {
  int64_t bytes = 0;
  for (const Optimizer::State state : Optimizer::kStates) bytes += size_of(Optimizer::dtype_of(state, config));
  return bytes * params.stored_elements();
}

}  // namespace

Checkpointer::Checkpointer(const Config& config, const Params& params, Device device, std::string parent,
                           std::vector<Tokenizer::File> tokenizer)
    : config_(config),
      params_(params),
      parent_(std::move(parent)),
      tokenizer_(std::move(tokenizer)),
      host_(device, staging_bytes(config, params)),
      copied_(device) {
  // Writes to every page of the staging memory now, because page faults would slow down the first save. Pinned memory
  // needs no such step.
  if (!device.is_cuda()) std::memset(host_.data(), 0, static_cast<size_t>(staging_bytes(config, params)));
}

Tensor Checkpointer::staged(Optimizer::State which) const {
  std::byte* at = host_.data();
  for (const Optimizer::State state : Optimizer::kStates) {
    const Tensor t(at, Optimizer::dtype_of(state, config_), {params_.stored_elements()}, Device::cpu());
    if (state == which) return t;
    at += t.bytes();
  }
  fail("no state of the optimizer has the number {}", static_cast<int>(which));
}

void Checkpointer::save(Context& ctx, Optimizer& optimizer, const RunState& state) {
  TRIAD_CHECK(!writing_.valid(), "a checkpoint of step {} while another is being written", state.step);
  const Clock::time_point begin = Clock::now();
  for (const Optimizer::State which : Optimizer::kStates)
    optimizer.gather(ctx, which, [&](const ElementRange& elements, const Tensor& values) {
      copy(ctx, staged(which).slice(0, elements.begin, elements.end), values);
    });
  copied_.record(ctx.stream);
  stall_ms_ = seconds_since(begin) * 1e3;
  writing_ = std::async(std::launch::async, [this, state] {
    copied_.synchronize();
    const Clock::time_point begin_writing = Clock::now();
    using enum Optimizer::State;
    const StateTensors tensors = {staged(parameter), staged(exp_avg), staged(exp_avg_sq)};
    const std::string folder = save_checkpoint(parent_, params_, tensors, config_, state, tokenizer_);
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
