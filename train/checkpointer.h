// Checkpointer: writes checkpoints while training continues. save() queues a copy of the state to host memory and
// returns; a thread of its own waits for the copy, writes, syncs and renames the files, then removes the checkpoints
// that train.keep_last and train.keep_every do not keep.
#pragma once
#include <future>
#include <optional>
#include <string>

#include "engine/memory.h"
#include "engine/stream.h"
#include "train/state.h"

namespace triad {

class Checkpointer {
 public:
  // parent: the folder for checkpoints in the run's folder. tokenizer: files copied into each checkpoint. Allocates
  // host memory for a copy of the optimizer's states; for a GPU the memory is pinned.
  Checkpointer(const Config&, const Params&, Device, std::string parent, std::vector<Tokenizer::File> tokenizer);

  struct Written {
    std::string folder;
    double stall_ms, write_s;  // time that save() took, ms; time that the thread took to write the checkpoint, s
  };
  // Begins a checkpoint of the state that the work queued on ctx.stream so far will produce. take() must have returned
  // the previous checkpoint. With shards the other ranks call Optimizer::gather for each of its states meanwhile.
  void save(Context&, Optimizer&, const RunState&);
  // Returns the checkpoint that save() began, once it is complete on disk; nullopt before that, or if none was begun.
  // Rethrows the error of a failed write, which leaves the older checkpoints unchanged.
  std::optional<Written> take(bool wait);

 private:
  Tensor staged(Optimizer::State) const;  // [stored elements], in host_

  const Config& config_;
  const Params& params_;
  std::string parent_;
  std::vector<Tokenizer::File> tokenizer_;
  PinnedMemory host_;
  Event copied_;
  double stall_ms_ = 0;
  std::future<Written> writing_;  // the last member, because its destructor waits for the thread, which uses the others
};

}  // namespace triad
