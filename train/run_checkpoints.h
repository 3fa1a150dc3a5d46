// RunCheckpoints: the checkpoints and final weights of a run. All ranks gather their shards; the first rank writes
// while training continues.
#pragma once
#include <optional>

#include "train/checkpointer.h"
#include "train/run_reporter.h"
#include "train/run_setup.h"

namespace triad {

class RunCheckpoints {
 public:
  RunCheckpoints(RunSetup& setup, RunReporter& reporter) : setup_(setup), reporter_(reporter) {}

  // Before the first step: saves a checkpoint of the initial state if train.save_every is set, unless the run resumes
  // in its own folder. The run can then be resumed from its start, and a disk that cannot be written fails now.
  // Collective.
  void begin();
  // Waits for the previous checkpoint and begins one. Collective.
  void save(const RunState&);
  // Reports a checkpoint that is complete on disk, or throws its error. step: steps done.
  void poll(int64_t step) { take(step, /*wait=*/false); }
  // The same, after waiting for it. Collective.
  void wait(int64_t step);
  bool saved(int64_t step) const { return saved_at_ == step; }
  // Writes model.safetensors. Collective.
  void write_final_weights();

  // If only this rank fails: whether it writes checkpoints; waits for a pending one without reporting it.
  bool writes() const { return checkpointer_.has_value(); }
  void finish_alone() { checkpointer_->take(/*wait=*/true); }

 private:
  void make_checkpointer();
  void take(int64_t step, bool wait);
  template <class Work>
  void run_on_first_rank(Work&&, const char* what);

  RunSetup& setup_;
  RunReporter& reporter_;
  std::optional<Checkpointer> checkpointer_;  // on the first rank
  std::optional<int64_t> saved_at_;           // step of the newest checkpoint in this folder
};

}  // namespace triad
