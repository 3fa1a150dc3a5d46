// Telemetry: a run's output. Passes each step's StepRecord to its sinks: Console (log and terminal), RunTables (CSV),
// Heartbeats (JSON lines) and TensorBoardWriter.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "engine/comm/comm.h"
#include "engine/memory.h"
#include "engine/routes.h"
#include "io/json_config.h"
#include "train/config.h"
#include "train/monitor/banner.h"
#include "train/monitor/console.h"
#include "train/monitor/heartbeats.h"
#include "train/monitor/pace.h"
#include "train/monitor/run_tables.h"
#include "train/monitor/tensorboard_writer.h"
#include "train/run_folder.h"

namespace triad {

// The first rank prints to stdout and writes the run's tables; every rank writes a log and its heartbeats.
class Telemetry {
 public:
  // The state that a resume starts from: rows of later steps are cut from the CSV files.
  struct Resume {
    int64_t step = -1, tokens = 0;  // -1: a fresh run
  };
  // verbose: detail() prints too.
  Telemetry(const Config&, const RunFolder&, Device, const Comm&, const Arena&, Resume, bool verbose);

  void banner(RunSummary);  // fills in planned_mib
  void step(StepRecord);    // fills in its second half
  void evaluation(int64_t step, double loss);
  // Writes the fallbacks counted since the last call to fallback_counters.csv.
  void fallbacks(int64_t step, const Routes&);
  // Logs kernels that were not logged before, in the first log.route_steps steps of this process; for matmul only if
  // runtime.kernels sets its kernels.
  void routes(const Routes&);
  void message(const std::string& text) { console_.message(text); }
  void detail(const std::string& text) { console_.detail(text); }
  // Any thread may call alert() and heartbeat().
  void alert(const std::string& text) { console_.alert(text); }
  void watched_by(const Watchdog* watchdog) { heartbeats_.watched_by(watchdog); }
  void heartbeat(int64_t step, const std::string& msg, const Json& more = Json::object()) {
    heartbeats_.write(step, msg, more);
  }
  double peak_mib() const;                             // planned memory
  TensorBoardWriter* board() { return board_.get(); }  // null on other ranks and without log.tensorboard

 private:
  const Config& config_;
  const Device device_;
  const Comm& comm_;
  const Arena& arena_;
  ThroughputMeter meter_;
  int64_t run_tokens_;  // trained on so far
  Console console_;
  std::optional<RunTables> tables_;  // on the first rank, with log.csv
  Heartbeats heartbeats_;
  std::unique_ptr<TensorBoardWriter> board_;
  size_t routes_logged_ = 0;  // entries of Routes::counts() that are in the log
  int64_t route_steps_logged_ = 0;
};

}  // namespace triad
