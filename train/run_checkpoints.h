// RunCheckpoints: writes the checkpoints and final weights of a run. All ranks gather their shards; the first rank
// writes while training continues.
#pragma once
#include <optional>

#include "train/checkpointer.h"
#include "train/run_reporter.h"
#include "train/run_setup.h"

namespace triad {

class RunCheckpoints {
 public:
  RunCheckpoints(RunSetup& setup, RunReporter& reporter) : setup_(setup), reporter_(reporter) {}

  // Call before the first step. If train.save_every is set, saves a checkpoint of the initial state, unless the run
  // resumes in its own folder. The run can then be resumed from its start, and an error of the disk appears now, not
  // later. Collective: all ranks call it.
  void begin();
  // Waits until the previous checkpoint is written and begins one. Collective: all ranks call it.
  void save(const RunState&);
  // If a checkpoint has been completed on disk since the last call, reports it; throws if writing it failed. step:
  // number of steps done.
  void poll(int64_t step) { take(step, /*wait=*/false); }
  // Waits for the pending checkpoint, then reports it as poll() does. Collective: all ranks call it.
  void wait(int64_t step);
  bool saved(int64_t step) const { return saved_at_ == step; }
  // Writes model.safetensors with the final weights. Collective: all ranks call it.
  void write_final_weights();

  // abandon() (train/run_exit.h) calls these after an error on this rank alone. writes(): whether this rank writes
  // checkpoints. finish_alone(): waits for a pending checkpoint without reporting it.
  bool writes() const { return checkpointer_.has_value(); }
  void finish_alone() { checkpointer_->take(/*wait=*/true); }

 private:
  void make_checkpointer();
  void take(int64_t step, bool wait);
  template <class Work>
  void run_on_first_rank(Work&&, const char* what);

  RunSetup& setup_;
  RunReporter& reporter_;
  std::optional<Checkpointer> checkpointer_;  // present on the first rank only
  std::optional<int64_t> saved_at_;           // step of the newest checkpoint in this run's folder
};

}  // namespace triad
