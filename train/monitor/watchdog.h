// Watchdog: a thread of each rank that looks at its progress (engine/process/progress.h) a few times a second and tells
// slow, still advancing, from hung. On a stall, and on SIGUSR1, it writes stackdump_rank{R}_{unix}.txt: what the rank
// was at and the stacks of all its threads. It also samples what takes too long for a step: NVML, this process's
// memory.
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
#include "train/config.h"

namespace triad {

// Slow or hung, from looks at a place. Pure: time is told. A step is slow that takes slow_s and slow_factor times what
// steps usually take, while its place still moves; a rank is hung whose place has not moved for hang_s, or in a
// checkpoint, where storage may take its time, for dist.timeout_s.
class StallRule {
 public:
  enum class State { advancing, slow, hung };
  explicit StallRule(const Config& config) : config_(config) {}
  State look(double now_s, const Progress::Position&);
  double still_s() const { return now_ - moved_; }      // since the place moved
  double step_s() const { return now_ - step_began_; }  // that the step under way has taken
  std::optional<double> usual_s() const;                // that a step takes; absent before some were seen
  double hang_s(const Progress::Position&) const;

 private:
  const Config& config_;
  std::optional<Progress::Position> last_;
  double now_ = 0, moved_ = 0, step_began_ = 0;
  std::deque<double> step_times_;
};

class Watchdog {
 public:
  // What it calls, on its own thread. heartbeat: a line for heartbeat_rank{R}.jsonl; alert: for a person; after_dump:
  // a stack dump that SIGUSR1 asked for is written, and the run goes on.
  struct Tell {
    std::function<void(int64_t step, const std::string& msg, const Json&)> heartbeat;
    std::function<void(const std::string&)> alert;
    std::function<void(int64_t step)> after_dump = {};
  };
  // first_step: done before this run. folder: where stack dumps go, and the ranks' heartbeats are.
  Watchdog(const Progress&, const Comm&, Device, const Config&, std::string folder, int64_t first_step, Tell);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

  // The last sample, at most about a second old.
  struct Sample {
    GpuUse gpu;
    double host_mib = 0;  // memory of this process that no file backs
  };
  Sample sample() const;
  // log.on_anomaly is stop and a step was slow: the run should end in order. (One that hangs is ended at once.)
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
  const Tell tell_;
  const Nvml nvml_;
  const int wake_;  // an eventfd: SIGUSR1 or the end

  StallRule rule_;
  StallRule::State state_ = StallRule::State::advancing;
  double next_pulse_s_ = 0;
  int64_t pulse_step_ = -1;
  mutable std::mutex mutex_;  // of the sample
  Sample sample_;
  std::atomic<bool> wants_stop_ = false, stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

// .anomaly_type: what stopped a run, on its first line; a description behind it.
void write_anomaly_type(const std::string& folder, const std::string& type, const std::string& text);

}  // namespace triad
