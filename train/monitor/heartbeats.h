// Heartbeats: writes heartbeat_rank{R}.jsonl, one JSON line per event on this rank, for programs that watch a run.
#pragma once
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/memory.h"
#include "io/json_config.h"
#include "io/jsonl.h"
#include "train/config/config.h"
#include "train/monitor/step_record.h"
#include "train/run/run_folder.h"

namespace triad {

class Watchdog;

class Heartbeats {
 public:
  // If log.heartbeat_every is 0, nothing is ever written.
  Heartbeats(const Config&, const RunFolder&, Device, const Comm&, const Arena&);

  void watched_by(const Watchdog* watchdog) { watchdog_ = watchdog; }  // later lines include the watchdog's samples
  // Writes a line with the fields that every line has, and `more`'s. Any thread may call it.
  void write(int64_t step, const std::string& msg, const Json& more = Json::object());
  // Writes a line for a finished step if one is due (heartbeat_due in pace.h).
  void step(const StepRecord&);

 private:
  using Clock = std::chrono::steady_clock;
  const Config& config_;
  const Device device_;
  const Comm& comm_;
  const Arena& arena_;
  std::optional<JsonLines> file_;
  // Atomic, because the watchdog's thread may call write() before watched_by() is called.
  std::atomic<const Watchdog*> watchdog_ = nullptr;
  std::vector<double> fetch_ms_;                // times that micro-steps waited for tokens since the last line, ms
  Clock::time_point last_step_ = Clock::now();  // when the last step line was written
};

}  // namespace triad
