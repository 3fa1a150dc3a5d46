// What the gates and selection lists of a step's forward passes have been, layer by layer (log.stats): summed on the
// device, micro-step by micro-step. Nothing waits for it, and a recorded forward may be replayed.
#pragma once
#include "engine/memory.h"
#include "kernels/nsa/stats.h"
#include "model/config.h"

namespace triad {

class LayerStats {
 public:
  // result [layers, NsaStats::count] f64: where finish() leaves them. A model with NSA.
  LayerStats(Arena&, const ModelConfig&, Tensor result);

  void clear(Context&);  // before a step's first forward
  // A layer has made them; not told of those that a replay makes again.
  void add(Context&, int64_t layer, ConstTensor gate, ConstTensor block_index);
  void finish(Context&);  // behind its last one
  Tensor result() const { return result_; }

 private:
  SelectOptions select_;
  Tensor pieces_, result_;
};

}  // namespace triad
