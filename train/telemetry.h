// What a run tells: the banner and progress lines for a person, CSV rows and heartbeats for programs.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm.h"
#include "engine/memory.h"
#include "engine/routes.h"
#include "io/csv.h"
#include "io/json_config.h"
#include "io/jsonl.h"
#include "train/board.h"
#include "train/config.h"
#include "train/run_folder.h"

namespace triad {

class Watchdog;

// The machine, the ranks, libraries, build, and of the environment the variables that concern a run: env.json.
Json environment_report(Device, const Comm&, const std::string& build);

// The first rank tells on stdout and in the run's files; with several, each also keeps a log and its heartbeats.
class Telemetry {
  using Clock = std::chrono::steady_clock;

 public:
  // resume_step >= 0: rows of later steps are cut from the CSV files, which are then appended to.
  Telemetry(const Config&, const RunFolder&, Device, const Comm&, const Arena&, int64_t resume_step);

  ~Telemetry();
  void banner(int64_t parameters, const std::vector<std::string>& environment, const std::string& data);
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
  // Time between its begin and end is not the steps'.
  class Pause {
   public:
    explicit Pause(Telemetry& telemetry) : telemetry_(telemetry), began_(Clock::now()) {}
    ~Pause() { telemetry_.last_row_ += Clock::now() - began_; }
    Pause(const Pause&) = delete;

   private:
    Telemetry& telemetry_;
    Clock::time_point began_;
  };
  void message(const std::string& text);  // a line that is not progress
  void end_line();                        // what comes next, an error say, begins a line of its own
  // Something is wrong: on stderr of whichever rank, and in its log. From any thread, as heartbeat().
  void alert(const std::string& text);
  void watched_by(const Watchdog* watchdog) { watchdog_ = watchdog; }  // whose samples heartbeats carry
  void heartbeat(int64_t step, const std::string& msg, const Json& more = Json::object());
  double peak_mib() const;
  Board* board() { return board_.get(); }  // none on other ranks than the first, or without log.tensorboard

 private:
  const Config& config_;
  Device device_;
  const Comm& comm_;
  const Arena& arena_;
  bool terminal_;
  bool line_open_ = false;  // a progress line on a terminal waits to be overwritten
  std::unique_ptr<CsvFile> training_, validation_, fallbacks_;
  size_t routes_told_ = 0;  // of Routes::counts()
  int64_t route_steps_told_ = 0;
  std::vector<int64_t> fallbacks_written_;  // calls of each of Routes::counts() that have their row
  std::unique_ptr<JsonLines> heartbeats_;
  std::unique_ptr<AppendFile> log_;                  // ranks/rank_R.log
  std::atomic<const Watchdog*> watchdog_ = nullptr;  // whose own thread writes heartbeats too, from its start on
  std::vector<double> fetch_ms_;                     // since the last heartbeat of a step
  std::unique_ptr<Board> board_;
  Clock::time_point last_row_;
  int64_t tokens_since_row_ = 0, steps_since_row_ = 0;
  double tokens_per_s_ = 0, peak_flops_ = 0, comm_ms_since_row_ = 0;
};

}  // namespace triad
