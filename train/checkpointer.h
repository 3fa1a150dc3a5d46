// Checkpoints beside training: save() copies the state to host memory behind the work that is queued and returns; a
// thread of its own checks, writes, syncs and renames meanwhile, then removes what train.keep_last and keep_every let
// go.
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
  // parent: the run's folder of checkpoints. Host memory: three times the parameters in fp32, pinned for a GPU.
  // tokenizer: of which each gets a copy.
  Checkpointer(const Config&, const Params&, Device, std::string parent, std::vector<Tokenizer::File> tokenizer);

  struct Written {
    std::string folder;
    double stall_ms, write_s;  // what save() took of the run; what the thread took beside it
  };
  // Begins a checkpoint of the state after the work queued on ctx.stream. The one before has to be taken.
  void save(Context&, const Optimizer::Moments&, const RunState&);
  // The checkpoint that was begun, once it is in place; nothing while it is not, or if none was begun. Throws what went
  // wrong with it: then the older ones are as they were.
  std::optional<Written> take(bool wait);

 private:
  Tensor buffer(int64_t i) const;

  const Config& config_;
  const Params& params_;
  std::string parent_;
  std::vector<Tokenizer::File> tokenizer_;
  PinnedMemory host_;
  Event copied_;
  double stall_ms_ = 0;
  std::future<Written> writing_;  // last: its end waits for the thread
};

}  // namespace triad
