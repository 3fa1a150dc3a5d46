#include "train/trainer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <future>
#include <numeric>

#include "engine/check.h"
#include "engine/comm/comm.h"
#include "engine/nvtx.h"
#include "engine/process/process_end.h"
#include "engine/process/progress_line.h"
#include "io/checkpoint.h"
#include "io/data/loader.h"
#include "io/file.h"
#include "train/checkpointer.h"
#include "train/cpu_advice.h"
#include "train/data_source.h"
#include "train/initial_state.h"
#include "train/load_config.h"
#include "train/memory_plan.h"
#include "train/monitor/grad_report.h"
#include "train/monitor/memory_report.h"
#include "train/monitor/selection_sample.h"
#include "train/monitor/stats_report.h"
#include "train/monitor/step_checks.h"
#include "train/monitor/telemetry.h"
#include "train/monitor/watchdog.h"
#include "train/run_folder.h"
#include "train/schedule.h"
#include "train/startup.h"
#include "train/state.h"
#include "train/stop_signal.h"
#include "train/train_step.h"

namespace triad {

namespace {

class Trainer {
 public:
  Trainer(const TrainRequest& request, Device device, OutsideMemory outside, std::unique_ptr<Comm> comm,
          FolderLock lock)
      : request_(request),
        config_(request.config),
        device_(device),
        outside_(std::move(outside)),
        comm_(std::move(comm)),
        lock_(std::move(lock)),
        resume_from_(find_resume(request, *comm_)),
        init_from_(find_init(config_, resume_from_)),
        tokenizer_(make_tokenizer(config_.data.tokenizer_or_bytes())),
        data_(open_data_for(config_, *tokenizer_, resume_from_, init_from_)),
        runtime_(allocate(config_, device_, *comm_)),
        step_(*runtime_, config_, comm_.get()),
        state_(begin_run(runtime_->ctx(), step_, *comm_, config_, data_, resume_from_, init_from_)),
        folder_(config_.log.out_dir, comm_->first() ? start_of(request, resume_from_) : RunFolder::Start::join, lock_),
        memory_(*runtime_, step_, outside_, folder_, *comm_) {
    runtime_->arena().seal();
    if (nvtx_) runtime_->ctx().listeners->push_back(nvtx_.get());
  }

  // Trains. An error is printed and ends the process (Comm::abandon).
  void run() {
    try {
      run_and_report();
      comm_->finish();
    } catch (const UsageError& e) { abandon(e.what(), 2); } catch (const std::exception& e) {
      abandon(e.what(), 1);
    }
  }

 private:
  // Ends this rank: prints the error, then waits for a pending checkpoint, at most dist.timeout_s.
  [[noreturn]] void abandon(const char* why, int exit_code) {
    begin_end();
    comm_->abandon(why, exit_code, [&] {
      if (checkpointer_) finish_checkpoint([&] { checkpointer_->take(/*wait=*/true); });
    });
  }
  // The same after an error that all ranks detect in the same step, so that they may wait for each other.
  [[noreturn]] void fail_together(const std::string& why) {
    begin_end();
    comm_->fail_together(why, [&] { finish_checkpoint([&] { wait_for_checkpoint(*telemetry_); }); });
  }
  void begin_end() {
    end_process_within(static_cast<double>(config_.dist.timeout_s));
    end_progress_line();
  }
  template <class Wait>
  void finish_checkpoint(Wait&& wait) {
    try {
      report_stage(runtime_->ctx(), Stage::checkpoint);  // in this stage the watchdog allows dist.timeout_s
    } catch (const Error&) {}                            // a failed GPU cannot record the stage
    report_also(wait);
  }

  void run_and_report() {
    try {
      run_steps();
    } catch (const OutOfMemory& e) {
      report_also([&] { memory_.write_oom(e); });
      throw;
    }
  }

  // Does extra reporting on an error that ends the run. If that fails too, prints why instead of hiding the first
  // error.
  template <class Work>
  static void report_also(Work&& work) {
    try {
      work();
    } catch (const std::exception& e) { std::fputs(fmt::format("triad: {}\n", e.what()).c_str(), stderr); }
  }

  // Not inlined, so that stack dumps show this name (gcc 14 would inline everything from here to train()).
  [[gnu::noinline]] void run_steps() {
    Context& ctx = runtime_->ctx();
    if (comm_->first()) make_folders(folder_.file("ranks"));
    comm_->barrier("the run's folder");  // prepared by the first rank
    comm_->record_collectives(folder_.file(fmt::format("ranks/rank_{}_collectives.csv", comm_->rank())));
    updates_ = state_.step;
    if (comm_->first()) {
      if (!resume_from_.empty()) set_aside_ = folder_.rewind(state_.step);
      write_file_atomically(folder_.file("config.json"), dump_json(config_to_json(config_), 2) + "\n");
      write_tokenizer_files(tokenizer_->files(), folder_.path());  // for users of the final weights
      write_file_atomically(folder_.file("env.json"),
                            dump_json(environment_report(device_, *comm_, request_.build), 2) + "\n");
    }
    if (step_.reducer() != nullptr)
      checks_.begin_bucket_table(resume_from_.empty() ? std::nullopt : std::optional(state_.step));
    Telemetry& telemetry = telemetry_.emplace(
        config_, folder_, device_, *comm_, runtime_->arena(),
        resume_from_.empty() ? Telemetry::Resume{} : Telemetry::Resume{state_.step, state_.tokens}, request_.verbose);
    grad_report_.emplace(config_, folder_, step_.model().params(), comm_->first(),
                         resume_from_.empty() ? -1 : state_.step);
    stats_report_.emplace(config_, folder_, comm_->first(), resume_from_.empty() ? -1 : state_.step);
    telemetry.banner({.parameters = count_parameters(config_.model),
                      .first_step = state_.step,
                      .data = data_.summary,
                      .environment = request_.environment});
    telemetry.detail("data: " + data_.description);
    if (!data_.warning.empty()) telemetry.message(data_.warning);
    if (const std::string why = comm_->why_not_shared(); !why.empty())
      telemetry.detail(fmt::format("communication: by NCCL's kernels, not by copies between the GPUs: {}", why));
    if (init_from_) telemetry.message(fmt::format("begins with the weights of {}", init_from_->weights));
    if (!resume_from_.empty()) {
      telemetry.message(fmt::format("resumed from {} at step {}", resume_from_, state_.step));
      const std::vector<std::string> changed = changed_since(resume_from_, config_);
      if (!changed.empty()) telemetry.message(fmt::format("changed since: {}", fmt::join(changed, "; ")));
      if (!set_aside_.empty()) telemetry.message("moved what was newer to " + set_aside_);
    }
    ctx.listeners->push_back(&progress_);
    watchdog_.emplace(
        progress_, *comm_, device_, config_, folder_.path(), state_.step,
        Watchdog::Callbacks{.heartbeat = [&](int64_t step, const std::string& msg,
                                             const Json& more) { telemetry_->heartbeat(step, msg, more); },
                            .alert = [&](const std::string& text) { telemetry_->alert(text); },
                            .after_dump = [&](int64_t step) { memory_.write_snapshot(fmt::format("step{}", step)); }});
    telemetry.watched_by(&*watchdog_);
    telemetry.heartbeat(state_.step, "boot");
    memory_.write_tables();
    memory_.write_snapshot("boot");

    report_stage(ctx, Stage::checkpoint);
    if (comm_->first() && config_.train.save_every > 0)
      checkpointer_.emplace(config_, step_.model().params(), device_, folder_.checkpoints(), tokenizer_->files());
    // A checkpoint before the first step: the run can be resumed from the start, and a disk that cannot be written
    // fails now.
    if (start_of(request_, resume_from_) == RunFolder::Start::resume) {
      saved_at_ = state_.step;
    } else if (config_.train.save_every > 0) {
      save(telemetry);
      wait_for_checkpoint(telemetry);
    }

    const auto began = std::chrono::steady_clock::now();
    const int64_t first_step = state_.step;
    settled_at_ = began;
    {
      Loader loader(data_.train, loader_options());
      memory_.write_snapshot("loader");
      while (state_.step < config_.train.steps) {
        queue_step(loader);
        settle(telemetry, /*leave=*/device_.is_cuda() ? 1 : 0);
        if (after_step(telemetry)) return stopped(telemetry);
      }
    }
    if (state_.step == first_step && config_.train.eval_every > 0) {  // the checkpoint was at train.steps already
      report_stage(ctx, Stage::evaluation);
      evaluate(telemetry);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    finish(telemetry, seconds, first_step);
  }

  // Allocates the run's memory. A run that does not fit writes its memory plan to the folder, unless a run has used it.
  static std::unique_ptr<Runtime> allocate(const Config& config, Device device, Comm& comm) {
    try {
      return allocate_planned(config, device, &comm);
    } catch (const PlanTooLarge& e) {
      report_also([&] {
        if (std::filesystem::exists(config.log.out_dir + "/config.json")) return;
        make_folders(config.log.out_dir);
        write_memory_snapshot(config.log.out_dir, MemoryReport::suffix(comm), e.plan);
      });
      throw;
    }
  }

  static double ms(std::chrono::steady_clock::duration d) {
    return std::chrono::duration<double, std::milli>(d).count();
  }
  bool due(int64_t every) const { return every > 0 && state_.step % every == 0; }
  int64_t positions() const { return config_.train.tokens_per_step() * comm_->world(); }
  int64_t step_targets() const {  // positions of a step, on all ranks, with a target token
    return positions() / config_.train.seq_len * data_.train->count_targets(config_.train.seq_len);
  }

  LoaderOptions loader_options() const {
    const TrainConfig& t = config_.train;
    return {.seq_len = t.seq_len,
            .micro_batch = t.micro_batch_size,
            .micro_steps = t.accumulate_grad_batches,
            .seed = static_cast<uint64_t>(config_.data.seed),
            .rank = comm_->rank(),
            .world = comm_->world(),
            .first_sequence = state_.sequences,
            .stall_s = config_.data.stall_s};
  }

  // Queues a step on the device. state_ counts it at once; settle() reads its result.
  void queue_step(Loader& loader) {
    const int64_t number = state_.step + 1, targets = step_targets();
    step_begins(number);
    std::vector<double>& fetch_ms = fetch_ms_.emplace_back();
    step_.begin(grad_report_->traces(number));
    for (int64_t i = 0; i < config_.train.accumulate_grad_batches; ++i) {
      report_stage(runtime_->ctx(), Stage::data);
      const auto asked = std::chrono::steady_clock::now();
      const Batch batch = loader.next();
      fetch_ms.push_back(ms(std::chrono::steady_clock::now() - asked));
      step_.micro_step(batch.tokens, batch.targets, targets);
    }
    try {
      step_.update(state_.step, targets, stop_wanted(), grad_report_->measures(number));
    } catch (const MissingGradients& e) {
      report_also([&] { grad_report_->missing(number, e); });
      throw;
    }
    ++state_.step;
    state_.sequences = loader.cursor();
    state_.tokens += positions();
    ++queued_;
  }

  // Waits for the results of all queued steps except the last `leave`, and reports them. The remaining step keeps a GPU
  // busy while the host reports.
  void settle(Telemetry& telemetry, int64_t leave) {
    for (; queued_ > leave; --queued_) {
      const int64_t step = state_.step - queued_ + 1;  // 1-based number of the settled step
      report_stage(runtime_->ctx(), Stage::result);
      const TrainStep::Result result = step_.result();
      progress_.step_done();
      const double step_ms =
          ms(std::chrono::steady_clock::now() - std::exchange(settled_at_, std::chrono::steady_clock::now()));
      last_loss_ = result.loss;
      stop_agreed_ = stop_agreed_ || result.stop;
      Json more = grad_report_->step(step, updates_, result, telemetry);
      more.update(stats_report_->step(step, result.stats, telemetry.board()));
      if (!result.finite) {
        const std::string where =
            result.bad_rank < 0 ? "no rank alone, but their sum" : fmt::format("rank {}", result.bad_rank);
        const std::string what =
            fmt::format("step {}: {}: loss {} and gradient norm {} are not both finite; first bad tensor: {}", step,
                        where, result.loss, result.grad_norm, result.bad_tensor);
        telemetry.heartbeat(step, "nonfinite", {{"text", what}});
        if (config_.train.on_nonfinite == OnNonfinite::stop) fail_together(what + ". train.on_nonfinite is stop");
        telemetry.message(what + ". The step is skipped");
      }
      telemetry.step({.step = step,
                      .loss = result.loss,
                      .lr = learning_rate(config_.train, step - 1),
                      .grad_norm = result.grad_norm,
                      .tokens = positions(),
                      .comm_ms = result.comm_ms,
                      .step_ms = step_ms,
                      .compute_ms = result.compute_ms,
                      .update_ms = result.update_ms,
                      .fetch_ms = fetch_ms_.front(),
                      .routes = &runtime_->ctx().routes,
                      .more = more});
      fetch_ms_.pop_front();
      if (result.buckets)
        if (const auto differ = checks_.buckets(telemetry, step, *result.buckets)) fail_together(*differ);
      checks_.anomalies(telemetry,
                        {.step = step,
                         .updates = updates_,
                         .tokens = static_cast<double>(positions()),
                         .seconds = step_ms / 1e3,
                         .gates = stats_report_->gates()},
                        result, watchdog_->sample());
      updates_ += result.finite && learning_rate(config_.train, step - 1) > 0;
      constexpr int64_t kWarmUpSteps = 5;
      if (++settled_ > kWarmUpSteps) comm_ms_ += result.comm_ms, gather_ms_ += result.gather_ms, ++comm_steps_;
    }
  }

  // Mean loss over the first eval_batches micro-batches of the validation split, dealt out to the ranks in turn. Losses
  // are added in the order of batches, so that the result does not depend on the number of ranks.
  void evaluate(Telemetry& telemetry) {
    const TrainConfig& t = config_.train;
    const int64_t batches = count_validation_batches(*data_.val, t.seq_len, t.micro_batch_size, t.eval_batches);
    std::vector<double> losses(static_cast<size_t>(batches)), counts = losses;
    for (int64_t i = comm_->rank(); i < batches; i += comm_->world()) {
      const Batch batch = validation_batch(*data_.val, t.seq_len, t.micro_batch_size, i);
      losses[static_cast<size_t>(i)] = step_.evaluate(batch.tokens, batch.targets);
      for (const int32_t target : batch.targets) counts[static_cast<size_t>(i)] += target >= 0;
      if (i == 0) sample_selection();  // batch 0 is on the first rank
    }
    comm_->add(losses, "the evaluation's losses");
    comm_->add(counts, "the evaluation's positions");
    val_loss_ = std::accumulate(losses.begin(), losses.end(), 0.0) / std::accumulate(counts.begin(), counts.end(), 0.0);
    telemetry.evaluation(state_.step, val_loss_);
  }

  void sample_selection() {
    if (!config_.log.stats || config_.model.dense()) return;
    const Json sample = selection_sample(runtime_->ctx(), step_.activations(), config_.model, state_.step);
    write_file_atomically(folder_.file(kSelectionSample), dump_json(sample, -1) + "\n");
  }

  // Runs work() on the first rank while the others wait. It may take long (a slow disk), so the ranks exchange a status
  // every second, which keeps the first rank from counting as hung.
  template <class Work>
  void run_on_first_rank(Work&& work, const char* what) {
    if (comm_->world() == 1) return work();
    std::future<void> done;
    if (comm_->first()) done = std::async(std::launch::async, work);
    for (char busy = 1; busy != 0;) {
      busy = done.valid() && done.wait_for(std::chrono::seconds(1)) != std::future_status::ready;
      busy = comm_->all_gather_host(busy, what).front();
    }
    if (done.valid()) done.get();
  }

  // Gathers the ranks' shards; then the first rank writes a checkpoint while training continues.
  void save(Telemetry& telemetry) {
    Context& ctx = runtime_->ctx();
    Params& params = step_.model().params();
    wait_for_checkpoint(telemetry);  // the previous one
    saved_at_ = state_.step;
    step_.optimizer().gather_master(params);
    const Optimizer::Moments moments = step_.optimizer().gather_moments(ctx, params);
    if (!comm_->first()) return;
    if (!checkpointer_) checkpointer_.emplace(config_, params, device_, folder_.checkpoints(), tokenizer_->files());
    checkpointer_->save(ctx, moments, state_);
  }

  void take_checkpoint(Telemetry& telemetry, bool wait) {
    if (!checkpointer_) return;
    const std::optional<Checkpointer::Written> written = checkpointer_->take(wait);
    if (!written) return;
    telemetry.heartbeat(state_.step, "checkpoint",
                        {{"folder", written->folder}, {"stall_ms", written->stall_ms}, {"write_s", written->write_s}});
    const std::string text = fmt::format("checkpoint {}, written in {:.1f} s", written->folder, written->write_s);
    if (settled_ > 0)
      telemetry.message(text);
    else
      telemetry.detail(text);  // the checkpoint before the first step
  }
  void wait_for_checkpoint(Telemetry& telemetry) {
    run_on_first_rank([&] { take_checkpoint(telemetry, /*wait=*/true); }, "a checkpoint being written");
  }

  bool anomaly_stops() const { return checks_.wants_stop() || watchdog_->wants_stop(); }
  bool stop_wanted() const {
    return stop_signal() != 0 || anomaly_stops() || (comm_->first() && folder_.halt_requested());
  }

  // Evaluation, checkpoint and snapshots after a step, excluded from step times. Returns whether the run stops here.
  bool after_step(Telemetry& telemetry) {
    const TrainConfig& t = config_.train;
    // Several ranks stop after the step whose result carries a stop request: all of them read it in the same step.
    const bool last = state_.step == t.steps, stop = comm_->world() == 1 ? stop_wanted() : stop_agreed_;
    const bool eval = due(t.eval_every) || (last && t.eval_every > 0);
    const bool save_now = due(t.save_every) || (last && t.save_every > 0 && t.save_last) || stop;
    take_checkpoint(telemetry, /*wait=*/false);
    if (eval || save_now || last) settle(telemetry, /*leave=*/0);
    const auto began = std::chrono::steady_clock::now();
    if (state_.step == 1 || due(config_.log.memory_every)) memory_.write_snapshot(fmt::format("step{}", state_.step));
    if (eval) {
      report_stage(runtime_->ctx(), Stage::evaluation);
      evaluate(telemetry);
    }
    telemetry.routes(runtime_->ctx().routes);
    if (save_now || last || stop) report_stage(runtime_->ctx(), Stage::checkpoint);
    if (due(config_.log.every) || last || stop) telemetry.fallbacks(state_.step, runtime_->ctx().routes);
    if (save_now) save(telemetry);
    if (last || stop) wait_for_checkpoint(telemetry);
    halted_ = stop && comm_->first() && folder_.halt_requested();
    if (halted_) folder_.clear_halt();
    settled_at_ += std::chrono::steady_clock::now() - began;
    return stop && !last;
  }

  // Reports an early stop. If an anomaly on any rank was the cause, the run fails (exit code 1).
  void stopped(Telemetry& telemetry) {
    const std::vector<char> anomalies = comm_->all_gather_host(char{anomaly_stops()}, "why the run stops");
    const bool anomaly = std::count(anomalies.begin(), anomalies.end(), 1) > 0;
    const std::string why = anomaly              ? "an anomaly, which .anomaly_type names"
                            : stop_signal() != 0 ? fmt::format("signal {}", stop_signal())
                            : halted_            ? ".HALT"
                                                 : "another rank's signal or .HALT";
    telemetry.heartbeat(state_.step, "stopped", {{"why", why}});
    const std::string text =
        fmt::format("stopped by {} after step {}, with a checkpoint. To go on{}: {}", why, state_.step,
                    comm_->world() > 1 ? ", under the same launcher" : "", resume_command(request_));
    if (!anomaly) return telemetry.message(text);
    fail_together(text + ". log.on_anomaly is stop");
  }

  void finish(Telemetry& telemetry, double seconds, int64_t first_step) {
    report_stage(runtime_->ctx(), Stage::checkpoint);
    step_.optimizer().gather_master(step_.model().params());
    run_on_first_rank([&] { save_weights(runtime_->ctx(), step_.model().params(), folder_.file("model.safetensors")); },
                      "the final weights being written");
    const double comm_ms = comm_steps_ > 0 ? comm_ms_ / static_cast<double>(comm_steps_) : 0;
    const double tokens = static_cast<double>((state_.step - first_step) * positions());
    Json metrics = {{"step", state_.step},
                    {"train_loss", last_loss_},
                    {"val_loss", val_loss_},
                    {"tokens", state_.tokens},
                    {"seconds", seconds},
                    {"tokens_per_s", seconds > 0 ? tokens / seconds : 0},
                    {"peak_mib", telemetry.peak_mib()}};
    if (comm_->world() > 1) metrics["comm_wait_ms"] = comm_ms;
    if (comm_->first()) {
      write_file_atomically(folder_.file("metrics.json"), dump_json(metrics, 2) + "\n");
      std::filesystem::remove(folder_.file(".anomaly_type"));  // an anomaly in the last step has stopped nothing
    }
    // After the final weights, so that a disk without space for both has the weights.
    if (config_.train.save_last && saved_at_ != state_.step) {
      save(telemetry);
      wait_for_checkpoint(telemetry);
    }
    telemetry.heartbeat(state_.step, "done");
    if (telemetry.board() != nullptr) telemetry.board()->done();
    if (comm_->world() > 1)
      telemetry.message(
          fmt::format("communication: {} buckets; behind its own work a step waits {:.3f} ms for the other "
                      "ranks{}",
                      step_.reducer()->buckets().size(), comm_ms,
                      config_.dist.zero == 1 && device_.is_cuda()
                          ? fmt::format("; new weights come in for {:.3f} ms beside the next forward",
                                        gather_ms_ / static_cast<double>(std::max<int64_t>(1, comm_steps_)))
                          : ""));
    const Routes& routes = runtime_->ctx().routes;
    if (routes.fallbacks() > 0) telemetry.message(routes.summary());
    telemetry.message(fmt::format("done: {} steps, loss {:.4f}, {:.1f} s; weights in {}", state_.step, last_loss_,
                                  seconds, folder_.file("model.safetensors")));
  }

  const TrainRequest& request_;
  const Config& config_;
  Device device_;
  OutsideMemory outside_;
  std::unique_ptr<Comm> comm_;
  FolderLock lock_;                      // declared before all members that write to the folder, so released after them
  std::string resume_from_, set_aside_;  // a checkpoint; the folder to which later checkpoints were moved
  std::optional<ModelSource> init_from_;
  std::unique_ptr<Tokenizer> tokenizer_;  // holds the files' content: later changes to the files have no effect
  DataSource data_;
  std::unique_ptr<OpListener> nvtx_ = nvtx_listener();
  std::unique_ptr<Runtime> runtime_;
  TrainStep step_;
  std::optional<GradReport> grad_report_;
  std::optional<StatsReport> stats_report_;
  std::optional<Checkpointer> checkpointer_;  // on the first rank
  std::optional<int64_t> saved_at_;           // step of the newest checkpoint in this folder
  RunState state_;
  RunFolder folder_;  // after all members whose constructors may refuse the run: its constructor changes files
  MemoryReport memory_;
  Progress progress_{device_};
  StepChecks checks_{config_, folder_, *comm_, step_};
  std::optional<Telemetry> telemetry_;
  std::optional<Watchdog> watchdog_;                  // its thread uses telemetry_
  int64_t updates_ = 0;                               // settled steps that changed the weights
  std::chrono::steady_clock::time_point settled_at_;  // of the last settled step, shifted by the time of after_step()
  std::deque<std::vector<double>> fetch_ms_;          // by queued step: wait for the tokens of each micro-step, ms
  bool stop_agreed_ = false, halted_ = false;
  int64_t settled_ = 0, comm_steps_ = 0;
  double comm_ms_ = 0, gather_ms_ = 0;       // sums over comm_steps_ steps of the result's fields, ms
  int64_t queued_ = 0;                       // steps that state_ counts but that are not settled
  double last_loss_ = NAN, val_loss_ = NAN;  // NaN (null in metrics.json): none yet
};

// Connects the ranks, and trains unless the run is complete.
void train_from(const TrainRequest& request, const LaunchEnv& launch) {
  const Config& config = request.config;
  const Device device = choose_run_device(request, launch);
  OutsideMemory outside(device);
  std::unique_ptr<Comm> comm = outside.during("communication", [&] { return connect_ranks(launch, device, config); });
  if (comm->first()) {
    const std::string warning = cpu_precision_warning(config, device, request.config_file);
    if (!warning.empty()) fmt::print(stderr, "triad: {}\n", warning);
  }
  FolderLock lock = lock_folder_for(config, *comm);
  if (const std::optional<int64_t> step = find_complete(request, *comm)) {
    if (comm->first())
      fmt::print("nothing is left to train: {} is at step {} already, train.steps is {}\n", config.log.out_dir, *step,
                 config.train.steps);
    return comm->finish();
  }
  Trainer(request, device, std::move(outside), std::move(comm), std::move(lock)).run();
}

}  // namespace

void train(const TrainRequest& request) {
  const LaunchEnv launch = read_launch_env();
  if (launch.world == 1) return train_from(request, launch);
  try {  // errors before training starts name the rank
    train_from(request, launch);
  } catch (const UsageError& e) { fail_usage("rank {}: {}", launch.rank, e.what()); } catch (const std::exception& e) {
    fail("rank {}: {}", launch.rank, e.what());
  }
}

}  // namespace triad
