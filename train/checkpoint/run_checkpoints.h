// RunCheckpoints: writes a run's checkpoints and final weights. Without dist.zero the first rank writes whole files;
// with it every rank writes its own file, and the first rank puts the checkpoint in place once the last one is written.
// The ranks learn that from each other where they all call poll(), wait() or save(). If any rank fails to write, all
// throw FailedTogether.
#pragma once
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "train/checkpoint/checkpointer.h"
#include "train/run/run_reporter.h"
#include "train/run/run_setup.h"

namespace triad {

class RunCheckpoints {
 public:
  RunCheckpoints(RunSetup& setup, RunReporter& reporter);

  // Call before the first step. If train.save_every or train.keep_best is set, saves a checkpoint of the initial state,
  // unless the run resumes in its own folder. The run can then be resumed from its start, and a disk error appears now,
  // not later. A state over 5 GB, or a resumed run's, isn't saved now; instead this throws if the disk has no room for
  // a checkpoint. Collective: all ranks call it.
  void begin();
  // Waits until the previous checkpoint is written and begins one. Collective: all ranks call it.
  void save(const RunState&);
  // If a checkpoint has been completed on disk since the last call, reports it; throws if writing it failed, and all
  // ranks know that. step: steps done. Collective: all ranks call it.
  void poll(int64_t step);
  // Waits for the pending checkpoint, then reports it as poll() does. Collective: all ranks call it.
  void wait(int64_t step);
  // Whether a checkpoint is being written that all ranks write; the answer is the same on all ranks.
  bool exchanges() const { return pending_; }
  // Whether a checkpoint that the first rank writes alone has failed, of which the other ranks have not learned yet: it
  // requests a stop, in which wait() throws on all ranks.
  bool failed() const { return failed_; }
  bool saved(int64_t step) const { return saved_at_ == step; }
  // Writes the final weights. Collective: all ranks call it.
  void write_final_weights();

  // Saves a checkpoint in a new folder, because the run's is lost, and returns that folder's path. A checkpoint that
  // was being written is given up. alone: this rank calls it alone, which rescues_alone() allows; else all ranks do.
  std::string rescue(const RunState&, bool alone);
  bool rescues_alone() const { return setup_.first() && !shared(); }

  // abandon() (train/run/run_exit.h) calls these after an error on this rank alone. completes(): whether this rank puts
  // checkpoints in place. finish_alone(): waits for a pending checkpoint without reporting it.
  bool completes() const { return setup_.first() && checkpointer_ != nullptr; }
  void finish_alone() { checkpointer_->finish_alone(); }

 private:
  bool shared() const { return !plan_.whole(); }  // every rank writes
  bool writes_files() const { return setup_.first() || shared(); }
  int64_t bytes() const;
  void check_space() const;
  std::unique_ptr<Checkpointer> make_checkpointer() const;
  Checkpointer::Place own_place() const;
  void start(const RunState&, const Checkpointer::Place&);
  std::string begin_shared(int64_t step, const Checkpointer::Place&);
  void advance(int64_t step, std::chrono::milliseconds wait);
  [[noreturn]] void fail_shared(int64_t step, int64_t rank);
  void poll_alone(int64_t step);
  void take(int64_t step, bool wait);

  RunSetup& setup_;
  RunReporter& reporter_;
  const FilePlan plan_;
  std::unique_ptr<Checkpointer> checkpointer_;       // present on the ranks that write
  std::future<std::unique_ptr<Checkpointer>> made_;  // the same while it is being made
  std::optional<int64_t> saved_at_;                  // the newest checkpoint's step in this run's folder
  bool failed_ = false;
  // A checkpoint that several ranks write: pending until it is in place; publishing once all files are written.
  bool pending_ = false, publishing_ = false;
};

}  // namespace triad
