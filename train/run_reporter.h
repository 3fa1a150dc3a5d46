// RunReporter: everything that a run prints and records: banner, steps, evaluations, checkpoints, its end; and the
// watchdog and checks that read the same numbers.
#pragma once
#include <cmath>
#include <optional>
#include <string>

#include "train/checkpointer.h"
#include "train/monitor/grad_report.h"
#include "train/monitor/memory_report.h"
#include "train/monitor/stats_report.h"
#include "train/monitor/step_checks.h"
#include "train/monitor/telemetry.h"
#include "train/monitor/watchdog.h"
#include "train/run_setup.h"
#include "train/step_queue.h"

namespace triad {

class RunReporter {
 public:
  explicit RunReporter(RunSetup&);

  // Writes the lines and files of the run's start and starts the watchdog. set_aside: the folder to which later
  // checkpoints were moved; empty: none were.
  void begin(const std::string& set_aside);
  // What the next step should record. step: its number.
  bool traces(int64_t step) const { return grad_report_.traces(step); }
  bool measures(int64_t step) const { return grad_report_.measures(step); }
  // Reports a step. Returns why the run must end, the same on all ranks; nullopt: it continues.
  std::optional<std::string> step(const SettledStep&);
  // Logs newly chosen kernels; with_fallbacks: also writes the fallbacks since the last time.
  void kernels(int64_t step, bool with_fallbacks);
  void evaluation(int64_t step, double loss);
  void checkpoint(int64_t step, const Checkpointer::Written&);
  void memory_snapshot(const std::string& when) { memory_.write_snapshot(when); }
  // Whether an anomaly requests an orderly stop.
  bool anomaly_stops() const { return checks_.wants_stop() || watchdog_->wants_stop(); }

  void stopped(int64_t step, const std::string& why);  // an early stop
  void message(const std::string& text) { telemetry_.message(text); }
  void write_metrics(const RunState&, double seconds);  // metrics.json, on the first rank
  void done(int64_t step, double seconds);

  void out_of_memory(const OutOfMemory& e) const { memory_.write_oom(e); }
  void missing_gradients(int64_t step, const MissingGradients& e) const { grad_report_.missing(step, e); }

 private:
  void print_start(const std::string& set_aside);
  void start_watchdog();
  // Reports a step that is not finite. Returns why the run must end.
  std::optional<std::string> not_finite(int64_t step, const TrainStep::Result&);
  double mean(double sum) const { return comm_steps_ > 0 ? sum / static_cast<double>(comm_steps_) : 0; }

  RunSetup& setup_;
  const Config& config_;
  MemoryReport memory_;
  StepChecks checks_;
  Telemetry telemetry_;
  GradReport grad_report_;
  StatsReport stats_report_;
  Progress progress_;
  std::optional<Watchdog> watchdog_;  // its thread uses telemetry_, memory_ and progress_
  int64_t updates_;                   // settled steps that changed the weights, and those before a resume
  int64_t settled_ = 0, comm_steps_ = 0;
  double comm_ms_ = 0, gather_ms_ = 0;       // sums over comm_steps_ steps of the result's fields, ms
  double last_loss_ = NAN, val_loss_ = NAN;  // NaN (null in metrics.json): none yet
};

}  // namespace triad
