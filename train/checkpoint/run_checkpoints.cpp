#include "train/checkpoint/run_checkpoints.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/process/progress.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "train/checkpoint/final_weights.h"
#include "train/checkpoint/rank_work.h"
#include "train/run/startup.h"
#include "train/run/stop_signal.h"

namespace triad {

using std::chrono::milliseconds;

RunCheckpoints::RunCheckpoints(RunSetup& setup, RunReporter& reporter)
    : setup_(setup),
      reporter_(reporter),
      plan_(setup.step.model().params(), shard_count(setup.config, setup.comm->world())) {}

void RunCheckpoints::begin() {
  constexpr int64_t kMostBytes = 5'000'000'000;  // most bytes of a first checkpoint that the run waits for
  report_stage(setup_.runtime->ctx(), Stage::checkpoint);
  if (start_of(setup_.request, setup_.resume_from) == RunFolder::Start::resume) saved_at_ = setup_.initial_state.step;
  if (setup_.resumed()) checkpoint_is_whole(setup_.initial_state.step);
  if (setup_.config.train.save_every == 0 && !setup_.config.train.keep_best) return;
  if (bytes() > kMostBytes || saved_at_) {
    run_on_ranks(
        *setup_.comm, setup_.first(), [this] { check_space(); }, "room for checkpoints");
  }
  if (bytes() > kMostBytes) {
    // Pinning this much memory takes seconds, in which the first steps can already be computed.
    if (writes_files()) made_ = std::async(std::launch::async, [this] { return make_checkpointer(); });
    return;
  }
  if (writes_files()) checkpointer_ = make_checkpointer();
  if (saved_at_) return;
  save(setup_.initial_state);
  wait(setup_.initial_state.step);
}

// Bytes in a checkpoint, all ranks together.
int64_t RunCheckpoints::bytes() const {
  int64_t bytes = 0;
  for (const Optimizer::State state : Optimizer::kStates)
    for (const ParamSpec& spec : setup_.step.model().params().specs())
      if (Optimizer::keeps(state, spec, setup_.config.train.optimizer))
        bytes += spec.shape.numel() * size_of(Optimizer::dtype_of(state, setup_.config));
  return bytes;
}

// Throws if the disk has no room for a checkpoint, or the folder cannot be written.
void RunCheckpoints::check_space() const {
  const std::string folder = setup_.folder.checkpoints();
  make_folders(folder);
  AtomicFile(folder + "/probe").write("a file can be written here\n");  // removed again, without taking its name
  const auto available = static_cast<double>(std::filesystem::space(folder).available);
  const auto needed = static_cast<double>(bytes());
  if (available < needed)
    fail("{} has {:.1f} GB free: a checkpoint of this run needs {:.1f} GB", folder, available * 1e-9, needed * 1e-9);
}

std::unique_ptr<Checkpointer> RunCheckpoints::make_checkpointer() const {
  return std::make_unique<Checkpointer>(setup_.config, setup_.step.model().params(), setup_.device, own_place(),
                                        setup_.tokenizer->files(), plan_, setup_.comm->rank());
}

Checkpointer::Place RunCheckpoints::own_place() const {
  return {setup_.folder.checkpoints(), [this] { setup_.folder.require(); }};
}

void RunCheckpoints::save(const RunState& state) {
  wait(state.step);
  saved_at_ = state.step;
  if (made_.valid()) checkpointer_ = made_.get();
  if (checkpointer_ == nullptr && writes_files()) checkpointer_ = make_checkpointer();
  start(state, own_place());
}

void RunCheckpoints::start(const RunState& state, const Checkpointer::Place& place) {
  Context& ctx = setup_.runtime->ctx();
  Optimizer& optimizer = setup_.step.optimizer();
  const std::string temporary = shared() ? begin_shared(state.step, place) : "";
  pending_ = shared();
  if (checkpointer_) return checkpointer_->save(ctx, optimizer, state, temporary);
  for (const Optimizer::State which : Optimizer::kStates) optimizer.gather(ctx, which, [](auto&&...) {});
}

// The first rank makes the folder for the files of all ranks.
std::string RunCheckpoints::begin_shared(int64_t step, const Checkpointer::Place& place) {
  std::string name;
  std::string why =
      fmt::format("the checkpoint of step {} is not written: the first rank could not make its folder", step);
  if (setup_.first()) {
    try {
      place.check();
      const std::string made = begin_checkpoint(place.parent, fmt::format("step_{}", step));
      name = std::filesystem::path(made).filename().string();
    } catch (const std::exception& e) { why = e.what(); }
  }
  name = setup_.comm->all_gather_host_text(name, "the folder of a checkpoint").front();
  if (name.empty()) throw FailedTogether(why);
  return place.parent + "/" + name;
}

void RunCheckpoints::poll(int64_t step) {
  // An error in making it appears now, not at the first save.
  if (made_.valid() && made_.wait_for(milliseconds(0)) == std::future_status::ready) checkpointer_ = made_.get();
  if (!shared()) return poll_alone(step);
  if (pending_) advance(step, milliseconds(0));
}

void RunCheckpoints::poll_alone(int64_t step) {
  // An error is left to wait(), because the other ranks do not take part here.
  const bool several = setup_.comm->world() > 1;
  if (several && checkpointer_ && checkpointer_->progress(milliseconds(0)) == WorkState::failed)
    failed_ = true;
  else
    take(step, /*wait=*/false);
}

void RunCheckpoints::wait(int64_t step) {
  if (!shared()) {
    Comm& comm = *setup_.comm;
    run_on_ranks(
        comm, comm.first(), [&] { take(step, /*wait=*/true); }, "a checkpoint being written");
  }
  while (pending_) advance(step, milliseconds(1000));
}

// Exchanges the ranks' progress with a checkpoint that all write, after waiting for this rank's own. Once all are done,
// the first rank puts the checkpoint in place; once that is done, nothing is pending.
void RunCheckpoints::advance(int64_t step, milliseconds wait) {
  const std::vector<WorkState> all =
      setup_.comm->all_gather_host(checkpointer_->progress(wait), "a checkpoint being written");
  if (std::count(all.begin(), all.end(), WorkState::busy) > 0) return;
  if (const auto failed = std::find(all.begin(), all.end(), WorkState::failed); failed != all.end())
    fail_shared(step, failed - all.begin());
  if (!std::exchange(publishing_, true)) {
    if (setup_.first()) checkpointer_->publish();
    return;
  }
  pending_ = publishing_ = false;
  take(step, /*wait=*/true);
}

// All ranks come here together, after all threads. The first one removes the folder before any rank ends.
void RunCheckpoints::fail_shared(int64_t step, int64_t rank) {
  pending_ = publishing_ = false;
  if (setup_.first()) checkpointer_->drop();
  setup_.comm->barrier("a failed checkpoint");
  std::string why =
      fmt::format("the checkpoint of step {} is not written: rank {} could not write its files", step, rank);
  try {
    checkpointer_->take(/*wait=*/true);
  } catch (const std::exception& e) { why = e.what(); }  // this rank's own error
  throw FailedTogether(why);
}

void RunCheckpoints::take(int64_t step, bool wait) {
  if (!checkpointer_) return;
  const std::optional<Checkpointer::Written> written = checkpointer_->take(wait);
  if (!written) return;
  if (saved_at_) checkpoint_is_whole(*saved_at_);  // none if the only save is a rescue
  reporter_.checkpoint(step, *written);
}

std::string RunCheckpoints::rescue(const RunState& state, bool alone) {
  std::string folder, why;
  if (setup_.first()) {
    try {
      folder = setup_.folder.make_rescue_folder();
    } catch (const Error& e) { why = e.what(); }
  }
  if (!alone) folder = setup_.comm->all_gather_host_text(folder, "the folder for a rescued checkpoint").front();
  if (folder.empty()) fail("{}", why.empty() ? "nothing could be saved by the first rank" : why);
  const Checkpointer::Place place = {.parent = folder + "/checkpoints"};
  if (made_.valid()) checkpointer_ = made_.get();
  if (checkpointer_ == nullptr && writes_files()) checkpointer_ = make_checkpointer();
  if (checkpointer_ != nullptr) {
    try {
      checkpointer_->take(/*wait=*/true);
    } catch (const std::exception&) {}  // it was written to the lost folder
    checkpointer_->write_to(place);
  }
  publishing_ = failed_ = false;
  start(state, place);
  if (alone)
    take(state.step, /*wait=*/true);
  else
    wait(state.step);
  return folder;
}

void RunCheckpoints::write_final_weights() {
  Context& ctx = setup_.runtime->ctx();
  report_stage(ctx, Stage::checkpoint);
  const Params& params = setup_.step.model().params();
  const Config& config = setup_.config;
  const DType held = Optimizer::dtype_of(Optimizer::State::parameter, config),
              dtype = config.train.final_dtype == Precision::bf16 ? DType::bf16 : held;
  const FinalFiles files = final_files(count_elements(params.specs()) * size_of(dtype), config.dist.zero == 3,
                                       shard_count(config, setup_.comm->world()));
  write_weight_files(
      ctx, params, *setup_.comm, files, held, dtype, setup_.folder.path(),
      [&](const BucketVisitor& visitor) { setup_.step.optimizer().gather(ctx, Optimizer::State::parameter, visitor); },
      [&] { setup_.folder.require(); });
}

}  // namespace triad
