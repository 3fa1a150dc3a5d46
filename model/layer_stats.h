// Statistics of the gates and selection lists of a step's forward passes, per layer (log.stats). They are accumulated
// on the device over the micro-steps, without synchronization, so a forward can be recorded and replayed.
#pragma once
#include "engine/memory.h"
#include "kernels/nsa/stats.h"
#include "model/config.h"

namespace triad {

class LayerStats {
 public:
  // result [layers, NsaStats::count] f64 is where finish() writes. Only for models with NSA.
  LayerStats(Arena&, const ModelConfig&, Tensor result);

  void clear(Context&);  // before a step's first forward
  // Adds the gates and lists of a layer's forward, not of its recomputation.
  void add(Context&, int64_t layer, ConstTensor gate, ConstTensor block_index);
  void finish(Context&);  // after a step's last forward
  Tensor result() const { return result_; }

 private:
  SelectOptions select_;
  Tensor pieces_, result_;
};

}  // namespace triad
