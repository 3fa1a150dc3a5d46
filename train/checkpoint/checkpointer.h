// Checkpointer: writes this rank's checkpoint files while training continues. save() queues a copy of the state to host
// memory and returns; a separate thread waits for the copy, then writes and syncs the files. If one rank writes whole
// checkpoints, the thread also renames the folder, and removes the checkpoints that train.keep_last, train.keep_every
// and train.keep_best do not keep. If all ranks write, the first rank does this in publish(), after the last rank.
#pragma once
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/stream.h"
#include "train/checkpoint/file_plan.h"
#include "train/checkpoint/rank_work.h"
#include "train/checkpoint/state.h"
#include "train/checkpoint/state_part.h"

namespace triad {

class Checkpointer {
 public:
  // The folder for checkpoints, and what throws Error if nothing may be written or removed there now, because the run's
  // folder is lost; it is called in the thread.
  struct Place {
    std::string parent;
    std::function<void()> check = [] {};
  };
  // tokenizer: files copied into each checkpoint. plan, rank: this rank writes file number `rank` of the plan.
  // Allocates host memory for three fp32 copies of that file's parameters; for a GPU the memory is pinned.
  Checkpointer(const Config&, const Params&, Device, Place, std::vector<Tokenizer::File> tokenizer, FilePlan plan,
               int64_t rank);

  struct Written {
    std::string folder;
    double stall_ms, write_s;  // time that save() took, ms; time from then until the checkpoint was on disk, s
  };
  // Begins a checkpoint of the state that the work queued on ctx.stream so far will produce. take() must have returned
  // the previous checkpoint. temporary: the folder from begin_checkpoint(), the same on all ranks; empty if this rank
  // writes the checkpoint alone. With shards the other ranks call Optimizer::gather for each state meanwhile.
  void save(Context&, Optimizer&, const RunState&, const std::string& temporary);
  // Writes later checkpoints to another place. take() must have returned the previous one.
  void write_to(Place place) { place_ = std::move(place); }
  // Begins to put the checkpoint in place, in the thread. Call on the first rank, after the threads of all ranks.
  void publish();

  // Waits for the thread, at most this long.
  WorkState progress(std::chrono::milliseconds wait);
  // Ends the thread's work, for which it waits if `wait` is set; nullopt if it hasn't ended. Returns the checkpoint if
  // it is in place now. Rethrows a failed write's error, which leaves the older checkpoints unchanged.
  std::optional<Written> take(bool wait);
  // Removes the folder after a save has failed on some rank.
  void drop() const;
  // take(), after publish() if all ranks write: waits until all ranks' files are in the folder, which other ranks must
  // be alive to write. For a rank that can't talk to the others any more.
  void finish_alone();

 private:
  void write_files(const std::string& folder) const;
  void put_in_place();
  void put_in_place_with_indices();
  template <class Work>
  void start(Work&& work);

  const Config& config_;
  const Params& params_;
  Place place_;
  std::vector<Tokenizer::File> tokenizer_;
  FilePlan plan_;
  int64_t rank_;
  StatePart part_;
  Event copied_;

  RunState state_;
  std::string temporary_;
  double stall_ms_ = 0;
  std::chrono::steady_clock::time_point began_;
  std::optional<Written> written_;
  std::exception_ptr error_;   // error in the thread's work; read once that has ended
  std::future<void> working_;  // the last member, because its destructor waits for the thread, which uses the others
};

}  // namespace triad
