#include "train/run/trainer.h"

#include <chrono>
#include <cstdio>
#include <optional>
#include <utility>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/progress.h"
#include "engine/process/tone.h"
#include "train/checkpoint/rank_work.h"
#include "train/checkpoint/run_checkpoints.h"
#include "train/run/cpu_advice.h"
#include "train/run/evaluation.h"
#include "train/run/run_exit.h"
#include "train/run/run_reporter.h"
#include "train/run/run_setup.h"
#include "train/run/startup.h"
#include "train/run/stop_signal.h"
#include "train/step/step_queue.h"

namespace triad {

namespace {

class Trainer {
 public:
  Trainer(const TrainRequest& request, Device device, StartTimes times, OutsideMemory outside,
          std::unique_ptr<Comm> comm, FolderLock lock)
      : setup_(request, device, std::move(times), std::move(outside), std::move(comm), std::move(lock)) {}

  // Trains. An error is printed and ends the process.
  void run() {
    try {
      run_and_report();
      setup_.step.forget_graphs();
      setup_.comm->finish();
    } catch (const UsageError& e) {
      report_failure(e.what());
      abandon(setup_, checkpoints(), e.what(), 2);
    } catch (const std::exception& e) { fail_run(e.what()); }
  }

 private:
  void run_and_report() {
    try {
      run_steps();
    } catch (const OutOfMemory& e) {
      if (reporter_) report_also([&] { reporter_->out_of_memory(e); });
      throw;
    } catch (const FolderLost& e) { end_together(rescue(e.what(), /*alone=*/false)); } catch (const FailedTogether& e) {
      fail_all_ranks(e.what());
    } catch (const std::exception& e) {
      if (!checkpoints_ || !checkpoints_->rescues_alone() || !is_lost_after_failure()) throw;
      finish_steps();
      fail("{}", rescue(setup_.folder.lost_text(), /*alone=*/true));
    }
  }

  // Ends the run after an error that all ranks have thrown together: with a rescue if the folder is lost, because the
  // write may have failed for that reason, and with the first rank's exit code on all.
  [[noreturn]] void fail_all_ranks(const std::string& why) {
    const std::string lost =
        first_text([&] { return setup_.folder.lost_after_failure() ? setup_.folder.lost_text() : std::string(); });
    if (!lost.empty()) {
      finish_steps();
      end_together(rescue(lost, /*alone=*/false));
    }
    const int code = setup_.comm->all_gather_host(exit_code(), "the exit code").front();
    end_together(with_lost_steps(why), code);
  }

  // Ends the run after an error of this rank.
  [[noreturn]] void fail_run(const std::string& why) {
    const std::string text = with_lost_steps(why);
    report_failure(text);
    abandon(setup_, checkpoints(), text.c_str(), exit_code());
  }

  // Ends the run after an error that all ranks know.
  [[noreturn]] void end_together(const std::string& why, int code = 1) {
    report_failure(why);
    fail_together(setup_, *checkpoints_, state().step, why, code);
  }

  // Records why the run fails.
  void report_failure(const std::string& why) {
    if (reporter_) report_also([&] { reporter_->failed(state().step, why); });
  }

  // If a signal has stopped the run and an error keeps its checkpoint from being written, the signal has lost steps,
  // which the message and the exit code say. Only the first rank knows their number.
  int64_t lost_steps() const { return state().step - last_whole_checkpoint().value_or(0); }
  int exit_code() const {
    const bool saved = setup_.first() && lost_steps() <= 0;
    return stop_.signal() == 0 || saved ? 1 : stopped_exit_code(stop_.signal());
  }
  std::string with_lost_steps(const std::string& why) const {
    if (!setup_.first() || exit_code() == 1) return why;
    const int64_t lost = lost_steps();
    return fmt::format("{}; the run was stopped by signal {} after step {}, and {} {} lost: {}", why, stop_.signal(),
                       state().step, counted(lost, "step"), lost == 1 ? "is" : "are", whole_checkpoint_text());
  }

  static std::string whole_checkpoint_text() {
    const std::optional<int64_t> whole = last_whole_checkpoint();
    return whole ? fmt::format("the last whole checkpoint is that of step {}", *whole) : "there is no checkpoint";
  }

  // Saves what a run whose folder is lost has trained. Returns why the run fails, and where that is.
  std::string rescue(const std::string& why, bool alone) {
    try {
      const std::string folder = checkpoints_->rescue(state(), alone);
      return fmt::format("{}. The weights and the state of step {} are in {}/checkpoints: --resume {} goes on", why,
                         state().step, folder, folder);
    } catch (const Error& e) { return fmt::format("{}; {}", why, e.what()); }
  }

  // Throws FolderLost if the run's folder is lost. Collective: all ranks call it, before they write to paths in it.
  void check_folder() {
    const std::string lost =
        first_text([&] { return setup_.folder.lost() ? setup_.folder.lost_text() : std::string(); });
    if (lost.empty()) return;
    settle(/*leave=*/0);
    throw FolderLost(lost);
  }

  // What the first rank says about the run's folder. Collective: all ranks call it.
  template <class Text>
  std::string first_text(Text&& text) {
    const std::string own = setup_.first() ? text() : std::string();
    return setup_.comm->all_gather_host_text(own, "whether the run's folder is lost").front();
  }

  // Whether this rank's error may come from the loss of the folder. Of several ranks another one may have failed too,
  // whose end does not wait.
  bool is_lost_after_failure() const {
    return setup_.comm->world() == 1 ? setup_.folder.lost_after_failure() : setup_.folder.lost();
  }

  // Waits for the queued steps, without reports.
  void finish_steps() {
    while (queue_.queued() > 0) queue_.settle();
  }

  // The whole run. Not inlined, so that stack dumps show this name (gcc 14 would inline everything from here to
  // train()).
  [[gnu::noinline]] void run_steps() {
    const std::string set_aside = setup_.write_initial_files();
    reporter_.emplace(setup_);
    reporter_->begin(set_aside);
    checkpoints_.emplace(setup_, *reporter_);
    setup_.comm->advise_at_end([this] { return advice_to_go_on(setup_); });
    checkpoints_->begin();
    setup_.times.ends("checkpoint");

    const StepQueue::Clock::time_point began = StepQueue::Clock::now();
    queue_.start_clock();
    for (const TrainStage& stage : stages_of(config_.train)) {
      if (state().step >= stage.end || out_of_patience()) continue;
      if (run_stage(stage) == End::stop) return stopped();
    }
    const bool trained = state().step > setup_.initial_state.step;
    if (!trained && config_.train.eval_every > 0 && !out_of_patience()) report_evaluation();
    finish(std::chrono::duration<double>(StepQueue::Clock::now() - began).count());
  }

  // Why a run ends before its last step: by an orderly stop, or by train.patience, with which it is complete.
  enum class End { none, stop, patience };

  // Runs the rest of a stage. Returns whether the run ends in it.
  End run_stage(const TrainStage& stage) {
    settle(/*leave=*/0);
    const StepQueue::Clock::time_point began = StepQueue::Clock::now();
    reporter_->stage(stage);
    LoaderOptions options = setup_.loader_options(stage, state());
    options.advances = [this] { report_stage(setup_.runtime->ctx(), Stage::data); };  // so that no resume looks hung
    Loader loader(setup_.data.train, options);
    queue_.exclude(StepQueue::Clock::now() - began);
    if (state().step == setup_.initial_state.step) reporter_->memory_snapshot("loader");
    while (state().step < stage.end) {
      queue_step(loader);
      settle(/*leave=*/setup_.device.is_cuda() ? 1 : 0);
      if (const End end = after_step(); end != End::none) return end;
    }
    return End::none;
  }

  const RunState& state() const { return queue_.state(); }
  RunCheckpoints* checkpoints() { return checkpoints_ ? &*checkpoints_ : nullptr; }
  bool out_of_patience() const { return state().validation.out_of_patience(config_.train); }
  bool due(int64_t every) const { return every > 0 && state().step % every == 0; }

  void queue_step(Loader& loader) {
    const int64_t step = queue_.next();
    try {
      queue_.push(loader, {.trace = reporter_->traces(step), .measure = reporter_->measures(step), .stop = [this] {
                             return stop_.requested(reporter_->anomaly_stops()) || checkpoints_->failed();
                           }});
    } catch (const MissingGradients& e) {
      report_also([&] { reporter_->missing_gradients(step, e); });
      throw;
    }
  }

  // Waits for all queued steps' results except the last `leave`, and reports them. The remaining step keeps a GPU busy
  // while the host reports.
  void settle(int64_t leave) {
    while (queue_.queued() > leave) {
      const SettledStep settled = queue_.settle();
      stop_.settled(settled.result);
      if (const std::optional<std::string> why = reporter_->step(settled)) end_together(*why);
    }
  }

  // Evaluation, checkpoint and snapshots after a step, excluded from step times. Returns whether the run ends here.
  End after_step() {
    const TrainConfig& t = config_.train;
    const int64_t step = state().step;
    const bool last = step == t.steps, stop = stop_.stops(reporter_->anomaly_stops());
    const bool eval = evaluates_after(t, step);
    bool save = due(t.save_every) || (last && t.save_every > 0 && t.save_last) || stop;
    const bool snapshot = step == 1 || due(config_.log.memory_every);
    if (eval || save || last || snapshot || checkpoints_->exchanges()) check_folder();
    checkpoints_->poll(step);
    if (eval || save || last) settle(/*leave=*/0);
    const StepQueue::Clock::time_point began = StepQueue::Clock::now();
    if (snapshot)
      run_on_all_ranks(
          *setup_.comm, [&] { reporter_->memory_snapshot(fmt::format("step{}", step)); }, "a memory snapshot");
    if (eval) evaluate_and_report();
    save = save || (eval && t.keep_best && state().validation.best_step == step);
    const bool patience = eval && !last && !stop && out_of_patience();
    if (save || last || stop) report_stage(setup_.runtime->ctx(), Stage::checkpoint);
    reporter_->kernels(step, /*with_fallbacks=*/due(config_.log.every) || last || stop || patience);
    if (stop) stop_.exchange_signals();
    if (save) checkpoints_->save(state());
    if (last || stop || patience) checkpoints_->wait(step);
    if (stop) stop_.consume_halt();
    queue_.exclude(StepQueue::Clock::now() - began);
    return stop && !last ? End::stop : patience ? End::patience : End::none;
  }

  // All ranks take the first one's loss, so that they save and end alike.
  void evaluate_and_report() {
    const double loss = report_evaluation();
    queue_.evaluated(setup_.comm->all_gather_host(loss, "the validation loss").front());
    reporter_->validation(state());
    if (config_.log.samples.empty()) return;
    const auto sample = [&] {
      if (setup_.first()) reporter_->samples(state().step, setup_.sampler->generate());
    };
    run_on_all_ranks(*setup_.comm, sample, "samples");
  }
  double report_evaluation() {
    const Evaluation evaluation = evaluate(setup_, state().step);
    reporter_->evaluation(state().step, evaluation);
    return evaluation.loss;
  }

  // An early stop. If an anomaly on any rank was the cause, the run fails (exit code 1).
  void stopped() {
    const StopPolicy::Reason reason = stop_.reason(reporter_->anomaly_stops());
    reporter_->stopped(state().step, reason.text);
    const std::string text = fmt::format("stopped by {} after step {}, with a checkpoint", reason.text, state().step);
    if (reason.anomaly) end_together(text + ". log.on_anomaly is stop");
    reporter_->message(fmt::format("{}. To go on{}: {}", text,
                                   setup_.comm->world() > 1 ? ", under the same launcher" : "",
                                   resume_command(setup_.request)));
  }

  // Ends a complete run. The last checkpoint is written after the final weights, so a disk without space for both has
  // the weights.
  void finish(double seconds) {
    check_folder();
    checkpoints_->write_final_weights();
    run_on_all_ranks(
        *setup_.comm, [&] { reporter_->write_metrics(state(), seconds); }, "metrics.json");
    if (config_.train.save_last && !checkpoints_->saved(state().step)) {
      checkpoints_->save(state());
      checkpoints_->wait(state().step);
    }
    reporter_->done(state().step, seconds);
  }

  RunSetup setup_;
  const Config& config_ = setup_.config;
  StepQueue queue_{setup_};
  StopPolicy stop_{setup_};
  std::optional<RunReporter> reporter_;        // made in run_steps(), after the folder's files
  std::optional<RunCheckpoints> checkpoints_;  // made in run_steps()
};

// Connects the ranks, and trains unless the run is complete.
void train_from(const TrainRequest& request, const LaunchEnv& launch) {
  StartTimes times;
  const Config& config = request.config;
  const Device device = choose_run_device(request, launch);
  OutsideMemory outside(device);
  times.ends("device");
  std::unique_ptr<Comm> comm =
      outside.during("communication", [&] { return connect_ranks(launch, device, config, request.build); });
  // Not earlier: a run without steps has nothing to save.
  await_stop_signals(/*acknowledge=*/comm->first(), launch.launcher, config.log.out_dir);
  if (comm->first()) {
    const std::string warning = cpu_precision_warning(config, device, request.config_file);
    if (!warning.empty()) print_warning(warning);
  }
  require_shared_folder(config, *comm);
  times.ends("ranks");
  FolderLock lock = lock_folder_for(config, *comm);
  if (const std::optional<int64_t> step = find_complete(request, *comm)) {
    if (comm->first())
      fmt::print("nothing is left to train: {} is at step {} already, {}\n", config.log.out_dir, *step,
                 *step < config.train.steps
                     ? fmt::format("where train.patience {} ended it; a larger one goes on", config.train.patience)
                     : fmt::format("train.steps is {}", config.train.steps));
    return comm->finish();
  }
  Trainer(request, device, std::move(times), std::move(outside), std::move(comm), std::move(lock)).run();
}

}  // namespace

void name_rank_in_errors(const std::function<void()>& work) {
  const LaunchEnv launch = read_launch_env();
  if (launch.world == 1) return work();
  const std::string rank = launch.local_world == launch.world
                               ? fmt::format("rank {}", launch.rank)
                               : fmt::format("rank {} (host {})", launch.rank, host_name());
  try {
    work();
  } catch (const UsageError& e) { fail_usage("{}: {}", rank, e.what()); } catch (const std::exception& e) {
    fail("{}: {}", rank, e.what());
  }
}

void train(const TrainRequest& request) { train_from(request, read_launch_env()); }

}  // namespace triad
