// Watchdog: a thread on each rank that checks the rank's progress (engine/process/progress.h) a few times per second
// and reports whether the rank advances, is slow or hangs. If the rank hangs, and on SIGUSR1, the watchdog writes
// stackdump_rank{R}_{unix}.txt with the current op and all threads' stacks. It also samples NVML and the process's
// memory, which would take too long in a step.
#pragma once
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "engine/comm/comm.h"
#include "engine/process/nvml.h"
#include "engine/process/progress.h"
#include "io/json_config.h"
#include "train/config/config.h"

namespace triad {

// StallRule: classifies a rank as advancing, slow or hung from progress samples. Pure: the caller passes the time.
// Slow: the current step has taken at least log.slow_s and at least log.slow_factor times its stage's median step time
// (train.stages), but progress continues. Hung: no progress for log.hang_s; in a checkpoint, where storage may be slow,
// no progress for dist.timeout_s if that is longer.
class StallRule {
 public:
  enum class State { advancing, slow, hung };
  // first_step: steps done before this process.
  explicit StallRule(const Config& config, int64_t first_step = 0) : config_(config), first_step_(first_step) {}
  State look(double now_s, const Progress::Position&);
  double still_s() const { return now_ - moved_; }      // time since the last progress
  double step_s() const { return now_ - step_began_; }  // time since the current step began
  std::optional<double> usual_s() const;                // median step time; nullopt in a stage's first steps
  double hang_s(const Progress::Position&) const;

 private:
  size_t stage_of(const Progress::Position&) const;

  const Config& config_;
  const int64_t first_step_;
  std::optional<Progress::Position> last_;
  double now_ = 0, moved_ = 0, step_began_ = 0;
  std::deque<double> step_times_;
};

class Watchdog {
 public:
  // Functions that the watchdog's thread calls. heartbeat: writes a line to heartbeat_rank{R}.jsonl. alert: prints a
  // problem. after_dump: runs after a stack dump that SIGUSR1 requested.
  struct Callbacks {
    std::function<void(int64_t step, const std::string& msg, const Json&)> heartbeat;
    std::function<void(const std::string&)> alert;
    std::function<void(int64_t step)> after_dump = {};
    // Shows that the first step goes on; called each wait_s seconds in it. where: the op that runs.
    std::function<void(int64_t step, double seconds, const std::string& where)> waiting = {};
    double wait_s = 0;
  };
  // first_step: steps done before this process. folder: the run's folder.
  Watchdog(const Progress&, const Comm&, Device, const Config&, std::string folder, int64_t first_step, Callbacks);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

  // The watchdog's newest sample, at most about a second old.
  struct Sample {
    GpuUse gpu;
    double host_mib = 0;  // this process's anonymous memory
  };
  Sample sample() const;
  // Whether a slow step requests an orderly stop, which it does with log.on_anomaly stop. (A hung run is ended
  // immediately.)
  bool wants_stop() const { return wants_stop_; }

 private:
  void run();
  void take_sample();
  void look(double now_s);
  void judge(StallRule::State, const Progress::Position&);
  std::string where(const Progress::Position&) const;
  std::string others(int64_t own_collectives) const;
  std::string dump(const std::string& why, const Progress::Position&) const;
  void stop_for(const char* type, const std::string& text);

  const Progress& progress_;
  const Comm& comm_;
  const Config& config_;
  const std::string folder_;
  const int64_t first_step_;
  const Callbacks callbacks_;
  const Nvml nvml_;
  const int wake_;  // an eventfd that wakes the thread; SIGUSR1's handler and the destructor write to it

  StallRule rule_;
  StallRule::State state_ = StallRule::State::advancing;
  double next_pulse_s_ = 0, next_word_s_ = 0;
  int64_t pulse_step_ = -1;
  mutable std::mutex mutex_;  // guards sample_
  Sample sample_;
  std::atomic<bool> wants_stop_ = false, stop_ = false;
  std::thread thread_;  // the last member, because the thread uses all others
};

// Writes the file .anomaly_type: the anomaly type that stopped the run, then its description.
void write_anomaly_type(const std::string& folder, const std::string& type, const std::string& text);

}  // namespace triad
