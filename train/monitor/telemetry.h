// Telemetry: writes a run's output. It passes each step's StepRecord to Console (log and terminal), RunTables (CSV),
// Heartbeats (JSON lines) and TensorBoardWriter.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "engine/comm/comm.h"
#include "engine/memory.h"
#include "engine/routes.h"
#include "io/json_config.h"
#include "train/config/config.h"
#include "train/monitor/banner.h"
#include "train/monitor/console.h"
#include "train/monitor/heartbeats.h"
#include "train/monitor/pace.h"
#include "train/monitor/run_tables.h"
#include "train/monitor/tensorboard_writer.h"
#include "train/run/run_folder.h"

namespace triad {

// On the first rank it prints to stdout and writes the run's tables; on every rank it writes a log and heartbeats.
class Telemetry {
 public:
  // The state from which a run resumes: later steps' rows are cut from the CSV files.
  struct Resume {
    int64_t step = -1, tokens = 0;  // -1: a fresh run
  };
  // step_flops: FLOPs per step on this rank. verbose: detail() prints to stdout too.
  Telemetry(const Config&, const RunFolder&, Device, const Comm&, const Arena&, Resume, double step_flops,
            bool verbose);

  void banner(RunSummary);  // completes the summary's planned_mib and step_flops, then prints the banner
  void stage(double step_flops, int64_t end, double later_flops) { meter_.stage(step_flops, end, later_flops); }
  void step(StepRecord);  // completes the record's second half, then passes it on
  void evaluation(int64_t step, double loss, double bits_per_byte);  // bits_per_byte: NaN if unknown
  // Writes to fallback_counters.csv the fallbacks that were counted since the last call.
  void fallbacks(int64_t step, const Routes&);
  // Logs the kernels that were not logged before, but only in this process's first log.route_steps steps; matmul's only
  // if runtime.kernels sets them.
  void routes(const Routes&);
  void message(const std::string& text) { console_.message(text); }
  void detail(const std::string& text) { console_.detail(text); }
  // alert(), waiting() and heartbeat() may be called from any thread.
  void alert(const std::string& text) { console_.alert(text); }
  void waiting(int64_t step, double seconds, const std::string& where) {
    console_.waiting(step, config_.train.steps, seconds, where);
  }
  bool on_terminal() const { return console_.terminal(); }
  void watched_by(const Watchdog* watchdog) { heartbeats_.watched_by(watchdog); }
  void heartbeat(int64_t step, const std::string& msg, const Json& more = Json::object()) {
    heartbeats_.write(step, msg, more);
  }
  double peak_mib() const;                             // planned memory peak
  TensorBoardWriter* board() { return board_.get(); }  // null on other ranks and without log.tensorboard

 private:
  const Config& config_;
  const Device device_;
  const Comm& comm_;
  const Arena& arena_;
  const double step_flops_;
  ThroughputMeter meter_;
  Console console_;
  std::optional<RunTables> tables_;  // present on the first rank, with log.csv
  Heartbeats heartbeats_;
  std::unique_ptr<TensorBoardWriter> board_;
  size_t routes_logged_ = 0;  // entries in Routes::counts() that are logged already
  int64_t route_steps_logged_ = 0;
};

}  // namespace triad
