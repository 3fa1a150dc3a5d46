// What a run tells: the banner and progress lines for a person, CSV rows and heartbeats for programs.
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

// The machine, the ranks, libraries, build, and of the environment the variables that concern a run: env.json.
Json environment_report(Device, const Comm&, const std::string& build);

// The first rank tells on stdout and in the run's files; with several, each also keeps a log and its heartbeats.
class Telemetry {
  using Clock = std::chrono::steady_clock;

 public:
  // Where the run goes on from: rows of later steps are cut from the CSV files, which are then appended to.
  struct Resume {
    int64_t step = -1, tokens = 0;  // -1: a fresh run
  };
  // verbose: what goes to the log alone is printed too.
  Telemetry(const Config&, const RunFolder&, Device, const Comm&, const Arena&, Resume, bool verbose);

  ~Telemetry();
  void banner(BannerFacts);  // all but planned_mib
  struct Step {
    int64_t step = 0;  // optimizer steps done, this one included
    double loss = 0, lr = 0, grad_norm = 0;
    int64_t tokens = 0;                                 // of this optimizer step, all ranks together
    double comm_ms = 0;                                 // that it waited for other ranks
    double step_ms = 0, compute_ms = 0, update_ms = 0;  // from result to result; of the device (TrainStep::Result)
    std::vector<double> fetch_ms = {};                  // that each micro-step waited for its tokens
    const Routes* routes = nullptr;                     // fb_* of the heartbeat
    Json more = Json::object();                         // of the heartbeat too
  };
  void step(const Step&);
  void evaluation(int64_t step, double loss);
  // What was counted since the last call goes to fallback_counters.csv, a row for each layer, op, kernel and reason.
  void fallbacks(int64_t step, const Routes&);
  // The choices of kernels that were not told yet, in the first log.route_steps steps of this process; of products only
  // where runtime.kernels chooses one.
  void routes(const Routes&);
  void message(const std::string& text);  // a line for a person that is not progress: to the log and the terminal
  void detail(const std::string& text);   // what a closer look asks for: to the log
  // Something is wrong: one line on stderr of whichever rank, the whole in its log. From any thread, as heartbeat().
  void alert(const std::string& text);
  void watched_by(const Watchdog* watchdog) { watchdog_ = watchdog; }  // whose samples heartbeats carry
  void heartbeat(int64_t step, const std::string& msg, const Json& more = Json::object());
  double peak_mib() const;
  TensorBoardWriter* board() { return board_.get(); }  // none on other ranks than the first, or without log.tensorboard

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
  std::timed_mutex terminal_mutex_;  // of what is written to the terminal: alert() comes from any thread
  Clock::time_point line_shown_;
  std::unique_ptr<CsvFile> training_, validation_, fallbacks_;
  size_t routes_told_ = 0;  // of Routes::counts()
  int64_t route_steps_told_ = 0;
  std::vector<int64_t> fallbacks_written_;  // calls of each of Routes::counts() that have their row
  std::unique_ptr<JsonLines> heartbeats_;
  std::unique_ptr<AppendFile> log_;                  // ranks/rank_R.log
  std::atomic<const Watchdog*> watchdog_ = nullptr;  // whose own thread writes heartbeats too, from its start on
  std::vector<double> fetch_ms_;                     // since the last heartbeat of a step
  std::unique_ptr<TensorBoardWriter> board_;
  Clock::time_point first_step_, last_heartbeat_;
  StepTimes step_times_;
  int64_t steps_ = 0, steps_since_row_ = 0, tokens_;  // steps of this process; tokens of the run
  double tokens_per_s_ = 0, peak_flops_ = 0, comm_ms_since_row_ = 0;
};

}  // namespace triad
