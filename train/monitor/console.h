// Console: writes the lines that people read: each rank's log, the first rank's stdout, and alerts on stderr.
#pragma once
#include <chrono>
#include <mutex>
#include <string>

#include "engine/comm/comm.h"
#include "io/file.h"
#include "train/monitor/step_record.h"
#include "train/run/run_folder.h"

namespace triad {

class Console {
 public:
  // verbose: detail() writes to stdout too, not only to the log.
  Console(const RunFolder&, const Comm&, bool verbose);
  ~Console();
  Console(const Console&) = delete;

  void message(const std::string& text);  // writes a line to the log and to stdout
  void detail(const std::string& text);   // writes a line to the log
  // Reports a problem on any rank: shortened on stderr, whole in the rank's log. Any thread may call it.
  void alert(const std::string& text);
  // Shows that a long first step goes on: by a progress line on a terminal, by a line elsewhere. Any thread may call
  // it. seconds: since the step began. where: the op that runs.
  void waiting(int64_t step, int64_t steps, double seconds, const std::string& where);
  bool terminal() const { return terminal_; }
  // Prints or redraws a step's progress line. steps: train.steps.
  void progress(const StepRecord&, int64_t steps);

 private:
  using Clock = std::chrono::steady_clock;
  void print(const std::string& text);

  const Comm& comm_;
  const bool terminal_, verbose_;
  std::timed_mutex terminal_mutex_;  // held while writing to the terminal, because any thread may call alert()
  Clock::time_point line_shown_;
  AppendFile log_;  // the file ranks/rank_R.log, where R is the rank
};

}  // namespace triad
