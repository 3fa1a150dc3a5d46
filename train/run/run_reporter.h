// RunReporter: prints and records everything about a run: banner, steps, evaluations, checkpoints and the run's end. It
// also owns the watchdog and the checks, which read the same numbers.
#pragma once
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "io/jsonl.h"
#include "train/checkpoint/checkpointer.h"
#include "train/monitor/grad_report.h"
#include "train/monitor/index_report.h"
#include "train/monitor/memory_report.h"
#include "train/monitor/stats_report.h"
#include "train/monitor/step_checks.h"
#include "train/monitor/telemetry.h"
#include "train/monitor/watchdog.h"
#include "train/run/evaluation.h"
#include "train/run/mixture_report.h"
#include "train/run/prompt_sampler.h"
#include "train/run/run_setup.h"
#include "train/step/step_queue.h"

namespace triad {

class RunReporter {
 public:
  explicit RunReporter(RunSetup&);

  // Writes the lines and files that belong to the run's start, and starts the watchdog. set_aside: the folder to which
  // later checkpoints were moved; empty if none were.
  void begin(const std::string& set_aside);
  // Reports that a stage, or the rest of one, begins. Does nothing without train.stages.
  void stage(const TrainStage&);
  // Whether the next step is to be traced, or measured. step: its number.
  bool traces(int64_t step) const { return grad_report_.traces(step); }
  bool measures(int64_t step) const { return grad_report_.measures(step); }
  // Reports a step. If the run must end, returns the reason, the same on all ranks; nullopt if it continues.
  std::optional<std::string> step(const SettledStep&);
  // Logs kernels that were chosen for the first time. with_fallbacks: also writes the fallbacks counted since the last
  // call.
  void kernels(int64_t step, bool with_fallbacks);
  void evaluation(int64_t step, const Evaluation&);
  void samples(int64_t step, const std::vector<PromptSample>&);  // only on the first rank
  void validation(const RunState&);  // where train.keep_best and train.patience stand after an evaluation
  void checkpoint(int64_t step, const Checkpointer::Written&);
  void memory_snapshot(const std::string& when) { memory_.write_snapshot(when); }
  // Whether an anomaly on this rank requests an orderly stop.
  bool anomaly_stops() const { return checks_.wants_stop() || watchdog_->wants_stop(); }

  void stopped(int64_t step, const std::string& why);  // reports an early stop
  void failed(int64_t step, const std::string& why);   // records why the run fails
  void message(const std::string& text) { telemetry_.message(text); }
  void write_metrics(const RunState&, double seconds);  // writes metrics.json on the first rank
  void done(int64_t step, double seconds);

  void out_of_memory(const OutOfMemory& e) const { memory_.write_oom(e); }
  void missing_gradients(int64_t step, const MissingGradients& e) const { grad_report_.missing(step, e); }

 private:
  void print_start(const std::string& set_aside);
  void warn_of_rate();  // reports a learning rate that jumps at a resume
  void start_watchdog();
  void estimate();                    // estimates the run's time
  std::string next_commands() const;  // what a user may do with the finished run
  void first_step_done();             // logs start phases that the banner could not have
  // Reports a step whose loss or gradient is not finite. If the run must end, returns the reason.
  std::optional<std::string> not_finite(int64_t step, const TrainStep::Result&);
  void without_targets(int64_t step);  // reports a step with all targets masked
  double mean(double sum) const { return comm_steps_ > 0 ? sum / static_cast<double>(comm_steps_) : 0; }

  RunSetup& setup_;
  const Config& config_;
  MemoryReport memory_;
  StepChecks checks_;
  Telemetry telemetry_;
  GradReport grad_report_;
  StatsReport stats_report_;
  IndexReport index_report_;
  MixtureReport mixture_;
  Progress progress_;
  std::optional<Watchdog> watchdog_;  // the watchdog's thread uses telemetry_, memory_ and progress_
  int64_t without_targets_ = 0;       // this process's steps without a target
  // Finished steps that changed the weights, including those before a resume, without dense steps, which don't change
  // the gates.
  int64_t updates_;
  Validation validation_;
  int64_t settled_ = 0, comm_steps_ = 0;
  std::optional<RunTime> estimate_;          // the time of the steps left; absent on cards without one
  double paced_s_ = 0, paced_tokens_ = 0;    // step times without the first steps', and these steps' tokens
  size_t phases_of_banner_ = 0;              // start phases that the banner shows
  double comm_ms_ = 0, gather_ms_ = 0;       // TrainStep::Times fields summed over comm_steps_ steps
  double last_loss_ = NAN, val_loss_ = NAN;  // NaN until the first value is known; metrics.json then has null
  double bits_per_byte_ = NAN;               // the last evaluation's
  std::optional<JsonLines> samples_;         // samples.jsonl, from the first samples on
};

}  // namespace triad
