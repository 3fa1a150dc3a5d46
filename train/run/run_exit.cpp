#include "train/run/run_exit.h"

#include <algorithm>
#include <vector>

#include "engine/process/counted.h"
#include "engine/process/process_end.h"
#include "engine/process/progress.h"
#include "engine/process/progress_line.h"
#include "io/checkpoint.h"
#include "io/json_config.h"
#include "train/checkpoint/run_checkpoints.h"
#include "train/run/startup.h"
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

void log_advice(const RunSetup& run) {
  const std::string advice = advice_to_go_on(run), rank = run.comm->rank_name(run.comm->rank()) + ": ";
  if (!advice.empty()) fmt::print(stderr, "triad: {}{}\n", run.comm->world() > 1 ? rank : "", advice);
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

std::string advice_to_go_on(const RunSetup& run) {
  const int64_t begun = last_begun_step();
  if (begun == 0 || run.folder.lost()) return "";
  const std::string checkpoints = run.folder.checkpoints();
  const std::optional<std::string> newest = find_newest_checkpoint(checkpoints);
  if (!newest)
    return fmt::format("{} {} lost, because there is no checkpoint: the same command begins again",
                       counted(begun, "step"), begun == 1 ? "is" : "are");
  const Json state = read_json_file(*newest + "/" + kStateFile);
  const int64_t step = state.at("step").get<int64_t>(), lost = begun - step;
  return fmt::format("{} lost since the checkpoint of step {}. To go on{}: {}",
                     lost <= 0 ? "no step is" : counted(lost, "step") + (lost == 1 ? " is" : " are"), step,
                     run.comm->world() > 1 ? ", under the same launcher" : "", resume_command(run.request));
}

void abandon(RunSetup& run, RunCheckpoints* checkpoints, const char* why, int exit_code) {
  begin_end(run);
  run.comm->abandon(why, exit_code, [&] {
    if (checkpoints != nullptr && checkpoints->completes())
      finish_checkpoint(run, [&] { checkpoints->finish_alone(); });
    report_also([&] { log_advice(run); });
  });
}

void fail_together(RunSetup& run, RunCheckpoints& checkpoints, int64_t step, const std::string& why, int exit_code) {
  begin_end(run);
  run.comm->fail_together(why, exit_code, [&] {
    finish_checkpoint(run, [&] { checkpoints.wait(step); });
    if (run.first()) report_also([&] { log_advice(run); });
  });
}

}  // namespace triad
