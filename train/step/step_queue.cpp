#include "train/step/step_queue.h"

#include <utility>

#include "engine/process/progress.h"
#include "train/run/stop_signal.h"

namespace triad {

namespace {
double ms(StepQueue::Clock::duration d) { return std::chrono::duration<double, std::milli>(d).count(); }
}  // namespace

void StepQueue::push(Loader& loader, const Options& options) {
  const TrainStage stage = stage_at(setup_.config.train, state_.step);
  int64_t targets = 0;  // targets in the whole step, on all ranks
  TrainStep& step = setup_.step;
  step_begins(next());
  std::vector<double>& fetch_ms = fetch_ms_.emplace_back();
  RowDocuments& documents = documents_.emplace_back();
  step.begin(options.trace, state_.step);
  for (int64_t i = 0; i < setup_.config.train.accumulate_grad_batches; ++i) {
    report_stage(setup_.runtime->ctx(), Stage::data);
    const Clock::time_point begin = Clock::now();
    const Batch batch = loader.next();
    fetch_ms.push_back(ms(Clock::now() - begin));
    targets = batch.step_targets;
    documents.add(batch.documents);
    state_.groups = batch.groups;
    step.micro_step(batch.tokens, batch.targets, targets, batch.bounds, {batch.padding_begin, batch.step_tokens});
  }
  step.update(state_.step, targets, options.stop(), options.measure);
  ++state_.step;
  state_.cursor = loader.cursor() * stage.seq_len;
  state_.tokens += setup_.step_tokens(stage);
  cursors_.push_back(state_.cursor);
  ++queued_;
}

SettledStep StepQueue::settle() {
  report_stage(setup_.runtime->ctx(), Stage::result);
  SettledStep settled;
  settled.number = state_.step - queued_ + 1;
  settled.result = setup_.step.result();
  const Clock::time_point now = Clock::now();
  settled.step_ms = ms(now - std::exchange(settled_at_, now));
  settled.fetch_ms = std::move(fetch_ms_.front());
  fetch_ms_.pop_front();
  settled.documents = documents_.front();
  documents_.pop_front();
  settled.cursor = cursors_.front();
  cursors_.pop_front();
  --queued_;
  return settled;
}

}  // namespace triad
