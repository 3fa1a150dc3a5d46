#include "train/run/run_exit.h"

#include <algorithm>
#include <vector>

#include "engine/process/process_end.h"
#include "engine/process/progress.h"
#include "engine/process/progress_line.h"
#include "train/checkpoint/run_checkpoints.h"
#include "train/run/stop_signal.h"

namespace triad {

namespace {

void begin_end(const RunSetup& run) {
  end_process_within(static_cast<double>(run.config.dist.timeout_s));
  end_progress_line();
}

template <class Wait>
void finish_checkpoint(RunSetup& run, Wait&& wait) {
  try {
    report_stage(run.runtime->ctx(), Stage::checkpoint);  // the watchdog waits up to dist.timeout_s in this stage
  } catch (const Error&) {}  // ignored: after a failure the GPU may be unable to record the stage
  report_also(wait);
}

}  // namespace

bool StopPolicy::requested(bool anomaly) const {
  return stop_signal() != 0 || anomaly || (setup_.first() && (setup_.folder.halt_requested() || setup_.folder.lost()));
}

void StopPolicy::exchange_signals() {
  const std::vector<int> all = setup_.comm->all_gather_host(stop_signal(), "the signals that stop the run");
  const auto first = std::ranges::find_if(all, [](int number) { return number != 0; });
  signal_ = first == all.end() ? 0 : *first;
}

void StopPolicy::consume_halt() {
  if (setup_.first() && setup_.folder.halt_requested()) setup_.folder.clear_halt();
}

StopPolicy::Reason StopPolicy::reason(bool own_anomaly) const {
  const std::vector<char> anomalies = setup_.comm->all_gather_host(char{own_anomaly}, "why the run stops");
  const bool anomaly = std::count(anomalies.begin(), anomalies.end(), 1) > 0;
  return {anomaly        ? "an anomaly, which .anomaly_type names"
          : signal_ != 0 ? fmt::format("signal {}", signal_)
                         : ".HALT",
          anomaly};
}

void abandon(RunSetup& run, RunCheckpoints* checkpoints, const char* why, int exit_code) {
  begin_end(run);
  run.comm->abandon(why, exit_code, [&] {
    if (checkpoints != nullptr && checkpoints->completes())
      finish_checkpoint(run, [&] { checkpoints->finish_alone(); });
  });
}

void fail_together(RunSetup& run, RunCheckpoints& checkpoints, int64_t step, const std::string& why, int exit_code) {
  begin_end(run);
  run.comm->fail_together(why, exit_code, [&] { finish_checkpoint(run, [&] { checkpoints.wait(step); }); });
}

}  // namespace triad
