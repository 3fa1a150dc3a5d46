#include "train/run/run_reporter.h"

#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>

#include "engine/process/counted.h"
#include "engine/process/text.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "io/weight_index.h"
#include "train/checkpoint/run_files.h"
#include "train/config/load_config.h"
#include "train/config/schedule.h"
#include "train/fit/planned_exchanges.h"
#include "train/fit/step_time.h"
#include "train/run/initial_state.h"
#include "train/run/row_documents.h"

namespace triad {

namespace {

Telemetry::Resume resume_of(const RunSetup& run) {
  return run.resumed() ? Telemetry::Resume{run.initial_state.step, run.initial_state.tokens} : Telemetry::Resume{};
}

// How many steps before this one were not dense.
int64_t steps_before(const TrainConfig& train, int64_t step) {
  int64_t steps = 0;
  for (const TrainStage& stage : stages_of(train)) {
    const int64_t begin = std::min(stage.begin, step), end = std::min(stage.end, step);
    if (stage.attention == StageAttention::alternate)
      steps += end / 2 - begin / 2;
    else if (!stage.has_dense_steps())
      steps += end - begin;
  }
  return steps;
}

double flops_of(const RunSetup& run, const TrainStage& stage) {
  return stage_flops(run.config, stage, attended_in(run.data, stage));
}

// Whether `after` is a learning rate that follows neither a step with rate `before` nor one whose next rate would be
// `expected`.
bool jumps(double after, double before, double expected) {
  constexpr double kMost = 1.2;
  return after > kMost * std::max(before, expected) || kMost * after < std::min(before, expected);
}

// A warning if a resume at `step` changes the config so that the learning rate jumps, as a finished cosine schedule's
// does with more steps; empty if it doesn't. Changing train.lr alone is no surprise.
std::string rate_warning(const TrainConfig& then, const TrainConfig& now, int64_t step) {
  if (step == 0 || step >= now.steps) return "";
  TrainConfig scaled = then;
  scaled.lr = now.lr;
  const double before = learning_rate(then, step - 1), after = learning_rate(now, step);
  if (!jumps(after, before, learning_rate(then, step)) ||
      !jumps(after, learning_rate(scaled, step - 1), learning_rate(scaled, step)))
    return "";
  std::string text = fmt::format("warning: the learning rate jumps from {:.2e} in step {} to {:.2e} in step {}", before,
                                 step, after, step + 1);
  if (then.steps != now.steps)
    text += fmt::format(", because train.steps {} -> {} changes the schedule {}", then.steps, now.steps,
                        word_of(now.schedule));
  if (then.schedule == Schedule::wsd && now.schedule == Schedule::wsd)
    return text + fmt::format(
                      ". To avoid it, resume from a checkpoint before the decay of train.schedule wsd, which "
                      "began after step {}",
                      then.steps - then.decay_steps());
  text += ". With train.schedule wsd a run can have more steps without a jump";
  if (before == 0) return text;
  const double share = static_cast<double>(now.steps - step) / static_cast<double>(now.steps);
  text += fmt::format("; here --set train.schedule=wsd --set train.lr={:.3g} goes on without one",
                      before / stage_at(now, step).lr_factor);
  if (now.decay_fraction > share) text += fmt::format(" (with --set train.decay_fraction={:.2g})", share / 2);
  return text;
}

// One rank's FLOPs in the steps after the first `done` ones.
double flops_after(const RunSetup& run, int64_t done) {
  double flops = 0;
  for (const TrainStage& stage : stages_of(run.config.train))
    if (stage.end > done) flops += flops_of(run, stage) * static_cast<double>(stage.end - std::max(stage.begin, done));
  return flops;
}

// FLOPs per step on one rank, averaged over the steps that the run has left.
double mean_step_flops(const RunSetup& run) {
  const int64_t first = run.initial_state.step, steps = run.config.train.steps - first;
  if (run.config.train.stages.empty() || steps <= 0) return flops_of(run, stage_at(run.config.train, first));
  return flops_after(run, first) / static_cast<double>(steps);
}

// The card whose times are estimated; nullopt on the CPU, and on other cards.
std::optional<Card> card_of(Device device) {
  return device.is_cuda() ? card_named(backend::info(device).name) : std::nullopt;
}

// A taught index's numbers in a step, for heartbeats and TensorBoard.
Json index_of_step(const TrainStep::Result& result) {
  return {{"index_loss", result.index_loss}, {"index_grad_norm", result.index_grad_norm}};
}

// Which documents this rank's rows hold in a step, for its heartbeat.
Json documents_of_step(const TrainConfig& t, const RowDocuments& documents) {
  const auto rows = static_cast<double>(t.micro_batch_size * t.accumulate_grad_batches);
  const double tokens = rows * static_cast<double>(t.seq_len);
  return {{"docs_per_row", static_cast<double>(documents.documents) / rows},
          {"docs_cut_share", static_cast<double>(documents.cut) / tokens},
          {"docs_padded_share", static_cast<double>(documents.padded) / tokens}};
}

}  // namespace

RunReporter::RunReporter(RunSetup& setup)
    : setup_(setup),
      config_(setup.config),
      memory_(*setup.runtime, setup.step, setup.outside, setup.folder, *setup.comm),
      checks_(config_, setup.folder, *setup.comm, setup.step),
      telemetry_(config_, setup.folder, setup.device, *setup.comm, setup.runtime->arena(), resume_of(setup),
                 mean_step_flops(setup), setup.request.verbose),
      grad_report_(config_, setup.folder, setup.step.model().params(), setup.first(), setup.resume_step(),
                   setup.data.attended.longest()),
      stats_report_(config_, setup.folder, setup.first(), setup.resume_step()),
      index_report_(config_, setup.folder, setup.first(), setup.resume_step()),
      mixture_(setup.data),
      progress_(setup.device),
      updates_(steps_before(config_.train, setup.initial_state.step)),
      validation_(setup.initial_state.validation) {}

void RunReporter::begin(const std::string& set_aside) {
  if (setup_.step.reducer() != nullptr)
    checks_.begin_bucket_table(setup_.resumed() ? std::optional(setup_.initial_state.step) : std::nullopt);
  print_start(set_aside);
  start_watchdog();
  Json boot = Json::object();
  if (!setup_.data.document_stats.is_null()) boot["documents"] = setup_.data.document_stats;
  if (mixture_.any()) boot["mixture"] = mixture_.table(setup_.initial_state.cursor);
  telemetry_.heartbeat(setup_.initial_state.step, "boot", boot);
  memory_.write_tables();
  memory_.write_snapshot("boot");
}

void RunReporter::stage(const TrainStage& stage) {
  if (config_.train.stages.empty()) return;
  telemetry_.stage(flops_of(setup_, stage), stage.end, flops_after(setup_, stage.end));
  checks_.stage();
  const std::string text = stage_text(config_, stage);
  telemetry_.message(text);
  telemetry_.heartbeat(std::max(stage.begin, setup_.initial_state.step), "stage", {{"text", text}});
}

void RunReporter::print_start(const std::string& set_aside) {
  setup_.times.ends("folder");
  estimate();
  phases_of_banner_ = setup_.times.phases().size();
  telemetry_.banner(
      {.parameters = count_parameters(config_.model),
       .first_step = setup_.initial_state.step,
       .data = setup_.data.summary + mixture_.text(last_cursor(config_, setup_.comm->world(), setup_.initial_state.step,
                                                               setup_.initial_state.cursor)),
       .documents = setup_.data.documents,
       .time = estimate_ ? run_time_text(*estimate_, *card_of(setup_.device), /*in_parts=*/false) : "",
       .start = setup_.times.text(),
       .environment = setup_.request.environment});
  telemetry_.detail("data: " + setup_.data.description);
  if (!setup_.data.warning.empty()) telemetry_.message("warning: " + setup_.data.warning);
  const GradReducer* const reducer = setup_.step.reducer();
  if (const std::string why = reducer == nullptr ? "" : reducer->why_no_copies(); !why.empty())
    telemetry_.detail(fmt::format("communication: by NCCL's kernels, not by copies between the GPUs: {}", why));
  if (setup_.init_from && !setup_.resumed()) telemetry_.message(describe_init(config_, *setup_.init_from));
  if (!setup_.resumed()) return;
  telemetry_.message(fmt::format("resumed from {} at step {}", setup_.resume_from, setup_.initial_state.step));
  if (!setup_.changed_data.empty())
    telemetry_.message(fmt::format("goes on with changed data (--accept-changed-data): {}", setup_.changed_data));
  const std::vector<std::string> changed = changed_since(setup_.resume_from, config_);
  if (!changed.empty()) telemetry_.message(fmt::format("changed since: {}", fmt::join(changed, "; ")));
  if (!set_aside.empty()) telemetry_.message("moved what was newer to " + set_aside);
  warn_of_rate();
}

void RunReporter::estimate() {
  const std::optional<Card> card = card_of(setup_.device);
  const int64_t done = setup_.initial_state.step;
  if (!card || !setup_.first() || done >= config_.train.steps) return;
  std::vector<DocumentMix> attended;
  for (const TrainStage& stage : stages_of(config_.train)) attended.push_back(attended_in(setup_.data, stage));
  const int world = setup_.comm->world();
  int64_t exchanged = 0;
  if (config_.dist.context > 1)
    exchanged = most_bytes(plan_exchanges(in_stage(config_, stages_of(config_.train).back()), setup_.device,
                                          make_planned_comm(world).get(), setup_.data.most_documents));
  estimate_ = run_time(config_, *card, world, done, attended, exchanged);
}

void RunReporter::warn_of_rate() {
  const int64_t step = setup_.initial_state.step;
  const TrainConfig then = config_from_json(config_of_checkpoint(setup_.resume_from)).train;
  const std::string text = rate_warning(then, config_.train, step);
  if (text.empty() || !setup_.first()) return;
  telemetry_.message(text);
  telemetry_.heartbeat(
      step, "lr_jump",
      {{"text", text}, {"lr_before", learning_rate(then, step - 1)}, {"lr", learning_rate(config_.train, step)}});
}

void RunReporter::start_watchdog() {
  constexpr double kTerminalWaitS = 2, kWaitS = 30;  // seconds between signs of life in the first step
  setup_.runtime->ctx().listeners->push_back(&progress_);
  watchdog_.emplace(
      progress_, *setup_.comm, setup_.device, config_, setup_.folder.path(), setup_.initial_state.step,
      Watchdog::Callbacks{.heartbeat = [this](int64_t step, const std::string& msg,
                                              const Json& more) { telemetry_.heartbeat(step, msg, more); },
                          .alert = [this](const std::string& text) { telemetry_.alert(text); },
                          .after_dump = [this](int64_t step) { memory_.write_snapshot(fmt::format("step{}", step)); },
                          .waiting = [this](int64_t step, double seconds,
                                            const std::string& where) { telemetry_.waiting(step, seconds, where); },
                          .wait_s = telemetry_.on_terminal() ? kTerminalWaitS : kWaitS});
  telemetry_.watched_by(&*watchdog_);
}

std::optional<std::string> RunReporter::step(const SettledStep& settled) {
  progress_.step_done();
  const TrainStep::Result& result = settled.result;
  const int64_t step = settled.number;
  const TrainStage stage = stage_at(config_.train, step - 1);
  const double lr = learning_rate(config_.train, step - 1);
  if (result.targets > 0) last_loss_ = result.loss;
  Json more = grad_report_.step(step, updates_, result, telemetry_);
  more.update(stats_report_.step(step, result.stats, telemetry_.board()));
  more.update(stats_report_.fp8(step, result.fp8_counts, telemetry_.board()));
  index_report_.step(step, result.index_losses, telemetry_.board());
  if (config_.model.has_index()) {
    more.update(index_of_step(result));
    if (TensorBoardWriter* const board = telemetry_.board(); board != nullptr && step % config_.log.every == 0)
      board->file().add(step, std::vector<Scalar>{{"train/loss_index", result.index_loss},
                                                  {"train/norm_index", result.index_grad_norm}});
  }
  if (!setup_.data.document_stats.is_null())
    more.update(documents_of_step(in_stage(config_, stage).train, settled.documents));
  more.update(mixture_.drawn(settled.cursor));
  if (!result.finite)
    if (const std::optional<std::string> why = not_finite(step, result)) return why;
  if (result.targets == 0) without_targets(step);
  telemetry_.step({.step = step,
                   .loss = result.loss,
                   .lr = lr,
                   .grad_norm = result.grad_norm,
                   .tokens = setup_.step_tokens(stage),
                   .comm_ms = result.times.comm,
                   .step_ms = settled.step_ms,
                   .compute_ms = result.times.compute,
                   .update_ms = result.times.update,
                   .fetch_ms = settled.fetch_ms,
                   .routes = &setup_.runtime->ctx().routes,
                   .more = more});
  if (result.buckets)
    if (const std::optional<std::string> why = checks_.buckets(telemetry_, step, *result.buckets)) return why;
  if (result.targets > 0)  // a loss and gradients of 0 without a target are no anomaly
    checks_.anomalies(telemetry_,
                      {.step = step,
                       .tokens = static_cast<double>(setup_.step_tokens(stage)),
                       .seconds = settled.step_ms / 1e3,
                       .gates = stats_report_.gates(),
                       .zero_grads = grad_report_.zeros()},
                      result, watchdog_->sample());
  updates_ += result.finite && result.targets > 0 && lr > 0 && !stage.is_dense(step - 1);
  if (settled_ == 0) first_step_done();
  constexpr int64_t kWarmUpSteps = 5;  // left out of the means if the run has more steps
  if (settled_ <= 1 || settled_ == kWarmUpSteps) paced_s_ = paced_tokens_ = 0;
  paced_s_ += settled.step_ms / 1e3, paced_tokens_ += static_cast<double>(setup_.step_tokens(stage));
  if (settled_++ == kWarmUpSteps) comm_ms_ = gather_ms_ = 0, comm_steps_ = 0;
  comm_ms_ += result.times.comm, gather_ms_ += result.times.gather, ++comm_steps_;
  return {};
}

void RunReporter::first_step_done() {
  setup_.times.ends("first step");
  telemetry_.detail("from the process's start to the end of the first step: " + setup_.times.text(phases_of_banner_));
}

std::optional<std::string> RunReporter::not_finite(int64_t step, const TrainStep::Result& result) {
  const std::string where =
      result.bad_rank < 0 ? "no rank alone, but their sum" : fmt::format("rank {}", result.bad_rank);
  const bool index = !std::isfinite(result.index_loss) || !std::isfinite(result.index_grad_norm);
  const std::string what =
      fmt::format("step {}: {}: {}loss {} and gradient norm {} are not both finite; first bad tensor: {}", step, where,
                  index ? "the index's " : "", index ? result.index_loss : result.loss,
                  index ? result.index_grad_norm : result.grad_norm, result.bad_tensor);
  telemetry_.heartbeat(step, "nonfinite", {{"text", what}});
  if (config_.train.on_nonfinite == OnNonfinite::stop) return what + ". train.on_nonfinite is stop";
  telemetry_.message(what + ". The step is skipped");
  return {};
}

void RunReporter::without_targets(int64_t step) {
  ++without_targets_;
  const std::string text = fmt::format(
      "step {}: no target: the loss mask leaves none of its tokens. The update is skipped ({} such steps so far)", step,
      without_targets_);
  telemetry_.heartbeat(step, "no_targets", {{"text", text}, {"steps", without_targets_}});
  telemetry_.message(text);
}

void RunReporter::kernels(int64_t step, bool with_fallbacks) {
  const Routes& routes = setup_.runtime->ctx().routes;
  telemetry_.routes(routes);
  if (with_fallbacks) telemetry_.fallbacks(step, routes);
}

void RunReporter::evaluation(int64_t step, const Evaluation& evaluation) {
  val_loss_ = evaluation.loss;
  bits_per_byte_ = evaluation.bits_per_byte;
  telemetry_.evaluation(step, evaluation.loss, evaluation.bits_per_byte);
  const Json index = index_report_.evaluation(step, evaluation.index, telemetry_.board());
  if (!setup_.first()) return;
  Json more = {{"val_loss", evaluation.loss}, {"bits_per_byte", evaluation.bits_per_byte}};
  more.update(index);
  telemetry_.heartbeat(step, "evaluation", more);
}

void RunReporter::samples(int64_t step, const std::vector<PromptSample>& samples) {
  if (!samples_) samples_.emplace(setup_.folder.file(kSamplesFile));
  std::string markdown;
  for (const PromptSample& s : samples) {
    samples_->append(
        {{"step", step}, {"prompt", s.prompt}, {"text", s.text}, {"tokens", s.tokens}, {"stopped", s.stopped}});
    telemetry_.message(fmt::format("sample: {}", printable(s.prompt + s.text)));
    markdown += as_code(s.prompt + s.text) + "\n\n---\n\n";
  }
  if (telemetry_.board() != nullptr) telemetry_.board()->file().add_text(step, "samples", markdown);
}

void RunReporter::validation(const RunState& state) {
  const Validation& v = validation_ = state.validation;
  const TrainConfig& t = config_.train;
  if ((!t.keep_best && t.patience == 0) || v.since == 0) return;
  const std::string of = t.patience > 0 ? fmt::format(" of {}", t.patience) : "";
  const std::string lowest =
      v.best_step < 0 ? "" : fmt::format("; the lowest loss was {:.4f} in step {}", v.best_loss, v.best_step);
  telemetry_.message(fmt::format("step {}  {}{} without a lower validation loss{}", state.step,
                                 counted(v.since, "evaluation"), of, lowest));
  if (!v.out_of_patience(t)) return;
  telemetry_.heartbeat(state.step, "patience", {{"since", v.since}, {"best_step", v.best_step}});
  telemetry_.message(
      fmt::format("the run ends after step {} of {}: train.patience is {}", state.step, t.steps, t.patience));
}

void RunReporter::checkpoint(int64_t step, const Checkpointer::Written& written) {
  telemetry_.heartbeat(step, "checkpoint",
                       {{"folder", written.folder}, {"stall_ms", written.stall_ms}, {"write_s", written.write_s}});
  const std::string text = fmt::format("checkpoint {}, written in {:.1f} s", written.folder, written.write_s);
  if (settled_ > 0)
    telemetry_.message(text);
  else
    telemetry_.detail(text);  // message about the checkpoint that was written before the first step
}

void RunReporter::stopped(int64_t step, const std::string& why) {
  telemetry_.heartbeat(step, "stopped", {{"why", why}});
}

void RunReporter::failed(int64_t step, const std::string& why) { telemetry_.heartbeat(step, "failed", {{"why", why}}); }

void RunReporter::write_metrics(const RunState& state, double seconds) {
  if (!setup_.first()) return;
  setup_.folder.require();
  const auto tokens = static_cast<double>(state.tokens - setup_.initial_state.tokens);
  Json metrics = {{"step", state.step},
                  {"train_loss", last_loss_},
                  {"val_loss", val_loss_},
                  {"tokens", state.tokens},
                  {"seconds", seconds},
                  {"tokens_per_s", seconds > 0 ? tokens / seconds : 0},
                  {"peak_mib", telemetry_.peak_mib()},
                  {"start_seconds", setup_.times.seconds()}};
  for (const StartTimes::Phase& phase : setup_.times.phases()) metrics["start_phases"][phase.name] = phase.seconds;
  if (std::isfinite(bits_per_byte_)) metrics["bits_per_byte"] = bits_per_byte_;
  if (const Validation& v = state.validation; v.any()) metrics[kEvaluationsSince] = v.since;
  if (const Validation& v = state.validation; v.best_step >= 0) {
    metrics["best_step"] = v.best_step;
    metrics["best_val_loss"] = v.best_loss;
  }
  if (estimate_) metrics["estimated_tokens_per_s"] = estimate_->tokens_per_s();
  if (mixture_.any()) metrics["mixture"] = mixture_.table(state.cursor);
  if (setup_.data.train.masked()) metrics["steps_without_targets"] = without_targets_;
  if (!setup_.data.document_stats.is_null()) metrics["documents"] = setup_.data.document_stats;
  if (setup_.comm->world() > 1) metrics["comm_wait_ms"] = mean(comm_ms_);
  write_file_atomically(setup_.folder.file("metrics.json"), dump_json(metrics, 2) + "\n");
  // The run is complete, so an anomaly in its last step has not stopped it.
  std::filesystem::remove(setup_.folder.file(".anomaly_type"));
}

void RunReporter::done(int64_t step, double seconds) {
  telemetry_.heartbeat(step, "done");
  if (telemetry_.board() != nullptr) telemetry_.board()->done();
  if (setup_.comm->world() > 1)
    telemetry_.message(fmt::format(
        "communication: {}; a step waits {:.3f} ms for other ranks after its own work{}",
        counted(setup_.step.reducer()->plan().buckets().size(), "bucket"), mean(comm_ms_),
        setup_.step.shards() != nullptr && setup_.device.is_cuda()
            ? fmt::format("; new weights arrive within {:.3f} ms, during the next forward", mean(gather_ms_))
            : ""));
  if (estimate_ && paced_s_ > 0)
    telemetry_.message(estimate_error_text(estimate_->tokens_per_s(), paced_tokens_ / paced_s_));
  const Routes& routes = setup_.runtime->ctx().routes;
  if (routes.fallbacks() > 0) telemetry_.message(routes.summary());
  const std::string loss = std::isfinite(last_loss_) ? fmt::format(", loss {:.4f}", last_loss_) : "";
  telemetry_.message(fmt::format("done: {}{}, {:.1f} s; weights in {}", counted(step, "step"), loss, seconds,
                                 tensors_path(setup_.folder.path())));
  if (const int64_t best = validation_.best_step; config_.train.keep_best && best >= 0) {
    const std::string folder = fmt::format("{}/step_{}", setup_.folder.checkpoints(), best);
    telemetry_.message(fmt::format("the lowest validation loss was {:.4f} in step {}: {}", validation_.best_loss, best,
                                   is_checkpoint(folder) ? folder : "its checkpoint is not in this folder"));
  }
  telemetry_.message(next_commands());
}

std::string RunReporter::next_commands() const {
  const std::string program = shell_word(setup_.request.program), path = setup_.folder.path();
  const std::string run = shell_word(path.starts_with('-') ? "./" + path : path);
  std::string text = fmt::format("next: {0} report {1}; {0} generate --checkpoint {1} --prompt TEXT", program, run);
  text += fmt::format("; {0} export {1} --out FOLDER", program, run);
  const TrainConfig& t = config_.train;
  if (t.save_last && t.stages.empty())
    text += fmt::format("; for more steps: {} train --resume {} --set {}", program, run,
                        validation_.out_of_patience(t) ? fmt::format("train.patience={}", 2 * t.patience)
                                                       : fmt::format("train.steps={}", 2 * t.steps));
  return text;
}

}  // namespace triad
