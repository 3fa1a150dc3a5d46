// Telemetry: a run's output: banner and progress lines for people, CSV rows, heartbeats and TensorBoard for programs.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/memory.h"
#include "engine/routes.h"
#include "io/csv.h"
#include "io/json_config.h"
#include "io/jsonl.h"
#include "train/config.h"
#include "train/monitor/banner.h"
#include "train/monitor/pace.h"
#include "train/monitor/tensorboard_writer.h"
#include "train/run_folder.h"

namespace triad {

class Watchdog;

// The content of env.json: machine, ranks, libraries, build and the environment variables that affect a run.
Json environment_report(Device, const Comm&, const std::string& build);

// The first rank prints to stdout and writes the run's tables; every rank writes a log and its heartbeats.
class Telemetry {
  using Clock = std::chrono::steady_clock;

 public:
  // The state that a resume starts from: rows of later steps are cut from the CSV files.
  struct Resume {
    int64_t step = -1, tokens = 0;  // -1: a fresh run
  };
  // verbose: detail() prints too.
  Telemetry(const Config&, const RunFolder&, Device, const Comm&, const Arena&, Resume, bool verbose);

  ~Telemetry();
  void banner(RunSummary);  // fills in planned_mib
  struct Step {
    int64_t step = 0;  // optimizer steps done, this one included
    double loss = 0, lr = 0, grad_norm = 0;
    int64_t tokens = 0;                                 // of this optimizer step, over all ranks
    double comm_ms = 0;                                 // wait for other ranks
    double step_ms = 0, compute_ms = 0, update_ms = 0;  // between results; device times of TrainStep::Result
    std::vector<double> fetch_ms = {};                  // by micro-step: wait for its tokens
    const Routes* routes = nullptr;                     // for the heartbeat's fb_*
    Json more = Json::object();                         // further fields of the heartbeat
  };
  void step(const Step&);
  void evaluation(int64_t step, double loss);
  // Writes the fallbacks counted since the last call to fallback_counters.csv, by layer, op, kernel and reason.
  void fallbacks(int64_t step, const Routes&);
  // Logs kernels that were not logged before, in the first log.route_steps steps of this process; for matmul only if
  // runtime.kernels sets its kernels.
  void routes(const Routes&);
  void message(const std::string& text);  // writes a line to the log and to stdout
  void detail(const std::string& text);   // writes a line to the log
  // Reports a problem on any rank: shortened on stderr, whole in the rank's log. Any thread may call alert() and
  // heartbeat().
  void alert(const std::string& text);
  void watched_by(const Watchdog* watchdog) { watchdog_ = watchdog; }  // heartbeats include its samples
  void heartbeat(int64_t step, const std::string& msg, const Json& more = Json::object());
  double peak_mib() const;
  TensorBoardWriter* board() { return board_.get(); }  // null on other ranks and without log.tensorboard

 private:
  void row(const Step&);
  void progress(const Step&, bool row);
  void step_heartbeat(const Step&);
  void print(const std::string& text);
  double eta_s(int64_t step) const;

  const Config& config_;
  Device device_;
  const Comm& comm_;
  const Arena& arena_;
  const bool terminal_, verbose_;
  std::timed_mutex terminal_mutex_;  // guards writes to the terminal, since any thread may call alert()
  Clock::time_point line_shown_;
  std::unique_ptr<CsvFile> training_, validation_, fallbacks_;
  size_t routes_logged_ = 0;  // entries of Routes::counts() that are in the log
  int64_t route_steps_logged_ = 0;
  std::vector<int64_t> fallbacks_written_;  // by entry of Routes::counts(): calls that are in fallback_counters.csv
  std::unique_ptr<JsonLines> heartbeats_;
  std::unique_ptr<AppendFile> log_;                  // ranks/rank_R.log
  std::atomic<const Watchdog*> watchdog_ = nullptr;  // atomic: its thread calls heartbeat() before watched_by()
  std::vector<double> fetch_ms_;                     // since the last step's heartbeat
  std::unique_ptr<TensorBoardWriter> board_;
  Clock::time_point first_step_, last_heartbeat_;
  StepTimes step_times_;
  int64_t steps_ = 0, steps_since_row_ = 0, tokens_;  // steps of this process; since the last row; tokens of the run
  double tokens_per_s_ = 0, peak_flops_ = 0, comm_ms_since_row_ = 0;
};

}  // namespace triad
