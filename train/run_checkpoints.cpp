#include "train/run_checkpoints.h"

#include <chrono>
#include <future>

#include "engine/process/progress.h"
#include "kernels/ops/cast.h"
#include "train/startup.h"

namespace triad {

void RunCheckpoints::begin() {
  report_stage(setup_.runtime->ctx(), Stage::checkpoint);
  const bool saves = setup_.config.train.save_every > 0;
  if (setup_.first() && saves) make_checkpointer();
  if (start_of(setup_.request, setup_.resume_from) == RunFolder::Start::resume) {
    saved_at_ = setup_.initial_state.step;
  } else if (saves) {
    save(setup_.initial_state);
    wait(setup_.initial_state.step);
  }
}

void RunCheckpoints::make_checkpointer() {
  checkpointer_.emplace(setup_.config, setup_.step.model().params(), setup_.device, setup_.folder.checkpoints(),
                        setup_.tokenizer->files());
}

void RunCheckpoints::save(const RunState& state) {
  Context& ctx = setup_.runtime->ctx();
  Optimizer& optimizer = setup_.step.optimizer();
  wait(state.step);
  saved_at_ = state.step;
  if (setup_.first()) {
    if (!checkpointer_) make_checkpointer();
    return checkpointer_->save(ctx, optimizer, state);
  }
  for (const Optimizer::State which : Optimizer::kStates) optimizer.gather(ctx, which, [](auto&&...) {});
}

void RunCheckpoints::take(int64_t step, bool wait) {
  if (!checkpointer_) return;
  if (const std::optional<Checkpointer::Written> written = checkpointer_->take(wait))
    reporter_.checkpoint(step, *written);
}

void RunCheckpoints::wait(int64_t step) {
  run_on_first_rank([&] { take(step, /*wait=*/true); }, "a checkpoint being written");
}

void RunCheckpoints::write_final_weights() {
  report_stage(setup_.runtime->ctx(), Stage::checkpoint);
  Context& ctx = setup_.runtime->ctx();
  const Params& params = setup_.step.model().params();
  std::vector<float> host(setup_.first() ? static_cast<size_t>(params.stored_elements()) : 0);
  setup_.step.optimizer().gather(ctx, Optimizer::State::parameter, [&](const ElementRange& e, const Tensor& values) {
    if (setup_.first()) read_floats(ctx, host.data() + e.begin, values);
  });
  run_on_first_rank(
      [&] {
        const Tensor whole(reinterpret_cast<std::byte*>(host.data()), DType::f32, {params.stored_elements()},
                           Device::cpu());
        save_weights(params, whole, setup_.folder.file("model.safetensors"));
      },
      "the final weights being written");
}

// Runs work() on the first rank while the others wait. The work may take long (a slow disk), so the ranks exchange a
// status every second; without it they would count as hung.
template <class Work>
void RunCheckpoints::run_on_first_rank(Work&& work, const char* what) {
  Comm& comm = *setup_.comm;
  if (comm.world() == 1) return work();
  std::future<void> done;
  if (comm.first()) done = std::async(std::launch::async, work);
  for (char busy = 1; busy != 0;) {
    busy = done.valid() && done.wait_for(std::chrono::seconds(1)) != std::future_status::ready;
    busy = comm.all_gather_host(busy, what).front();
  }
  if (done.valid()) done.get();
}

}  // namespace triad
