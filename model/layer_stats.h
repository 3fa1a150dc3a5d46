// Statistics on gates and selection lists in a step's forward passes, per layer (log.stats). They are accumulated on
// the device over the micro-steps without synchronization, so that a forward can be recorded and replayed.
#pragma once
#include <vector>

#include "engine/memory.h"
#include "kernels/nsa/stats.h"
#include "model/config.h"

namespace triad {

class LayerStats {
 public:
  // Only for models with selection lists. result [layers, NsaStats::count] f64: finish() writes the statistics there.
  LayerStats(Arena&, const ModelConfig&, Tensor result);

  void clear(Context&);  // call before a step's first forward
  // Adds one layer's gates and lists in a forward. Not called for a recomputation.
  void add(Context&, int64_t layer, ConstTensor gate, ConstTensor block_index, const Documents&);
  void finish(Context&);  // call after a step's last forward
  Tensor result() const { return result_; }

 private:
  std::vector<SelectOptions> select_;  // options of each layer
  Tensor pieces_, result_;
};

}  // namespace triad
