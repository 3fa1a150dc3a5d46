// Three ways in which a run ends before it is complete. Orderly stop, requested on any rank by a signal, by the
// file .HALT, or by an anomaly with log.on_anomaly stop: all ranks stop after the same step, with a checkpoint;
// StopPolicy decides when, and why. A run whose folder is lost stops in the same way, but saves elsewhere and fails.
// One rank fails with an exception: abandon() prints it and ends the process. All ranks fail with an error that they
// detect in the same step, or learn of together (FailedTogether): fail_together() ends them with one exit code.
#pragma once
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <string>

#include "train/run/run_setup.h"

namespace triad {

class RunCheckpoints;

class StopPolicy {
 public:
  explicit StopPolicy(const RunSetup& setup) : setup_(setup) {}

  // Whether this rank requests a stop. anomaly: whether an anomaly on this rank requests one.
  bool requested(bool anomaly) const;
  // Call with each finished step's result: with several ranks it contains all ranks' stop requests.
  void settled(const TrainStep::Result& result) { agreed_ = agreed_ || result.stop; }
  // Whether the run stops now; the answer is the same on all ranks.
  bool stops(bool anomaly) const { return setup_.comm->world() == 1 ? requested(anomaly) : agreed_; }
  // Call when the run stops, before its checkpoint: exchanges the signals that the ranks have received, so that all
  // of them end alike. Collective: all ranks call it.
  void exchange_signals();
  int signal() const { return signal_; }  // that has stopped the run, whichever rank received it; 0: none
  // Removes the file .HALT; called when the run stops.
  void consume_halt();

  struct Reason {
    std::string text;
    bool anomaly = false;  // an anomaly on any rank requested the stop
  };
  Reason reason(bool anomaly) const;  // why the run stops; collective: all ranks call it

 private:
  const RunSetup& setup_;
  bool agreed_ = false;
  int signal_ = 0;
};

// For a run that fails after its first step has begun: the steps that are lost since the newest checkpoint in its
// folder, and the command that goes on. Empty if no step has begun, or the folder is lost. May be called from any
// thread.
std::string advice_to_go_on(const RunSetup&);

// Prints why the run fails, waits for this rank's pending checkpoint, at most dist.timeout_s, and ends the process.
// checkpoints: may be null.
[[noreturn]] void abandon(RunSetup&, RunCheckpoints* checkpoints, const char* why, int exit_code);
// Ends the run as abandon() does, but called by all ranks, which wait for each other first. step: steps done.
[[noreturn]] void fail_together(RunSetup&, RunCheckpoints&, int64_t step, const std::string& why, int exit_code = 1);

// Runs extra reporting, work(), about an error that ends the run. If work() throws too, prints that error, so that the
// first one is not hidden.
template <class Work>
void report_also(Work&& work) {
  try {
    work();
  } catch (const std::exception& e) { std::fputs(fmt::format("triad: {}\n", e.what()).c_str(), stderr); }
}

}  // namespace triad
