// How a run ends before it is complete.
//   Orderly stop: a signal, .HALT, or an anomaly with log.on_anomaly stop, on any rank. All ranks stop after the same
//   step, with a checkpoint. StopPolicy decides when, and why.
//   Failure of one rank: an exception. abandon() prints it and ends the process.
//   Failure of all ranks: an error that all detect in the same step. fail_together() ends them together.
#pragma once
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <string>

#include "train/run_setup.h"

namespace triad {

class RunCheckpoints;

class StopPolicy {
 public:
  explicit StopPolicy(const RunSetup& setup) : setup_(setup) {}

  // Whether this rank requests a stop. anomaly: an anomaly on this rank requests one.
  bool requested(bool anomaly) const;
  // A settled step's result: with several ranks it carries the requests of all.
  void settled(const TrainStep::Result& result) { agreed_ = agreed_ || result.stop; }
  // Whether the run stops now, the same on all ranks.
  bool stops(bool anomaly) const { return setup_.comm->world() == 1 ? requested(anomaly) : agreed_; }
  // The run stops: removes .HALT.
  void consume_halt();

  struct Reason {
    std::string text;
    bool anomaly = false;  // on any rank
  };
  Reason reason(bool anomaly) const;  // collective

 private:
  const RunSetup& setup_;
  bool agreed_ = false, halted_ = false;
};

// Prints why, waits for a pending checkpoint of this rank, at most dist.timeout_s, and ends the process. checkpoints:
// may be null.
[[noreturn]] void abandon(RunSetup&, RunCheckpoints* checkpoints, const char* why, int exit_code);
// The same on all ranks, which wait for each other. step: steps done.
[[noreturn]] void fail_together(RunSetup&, RunCheckpoints&, int64_t step, const std::string& why);

// Does extra reporting on an error that ends the run. If that fails too, prints why instead of hiding the first error.
template <class Work>
void report_also(Work&& work) {
  try {
    work();
  } catch (const std::exception& e) { std::fputs(fmt::format("triad: {}\n", e.what()).c_str(), stderr); }
}

}  // namespace triad
