// IndexSample: how well the lists of a taught index follow dense attention, measured in some rows of a forward pass
// (log.stats). Reads the pass's activations and changes nothing in it.
#pragma once
#include <span>
#include <vector>

#include "kernels/nsa/list_recall.h"
#include "model/activations.h"

namespace triad {

// A layer's values over the sampled rows. p: dense attention's probabilities, averaged over the heads.
struct IndexRecall {
  struct Distance {
    int64_t begin = 0;            // smallest distance of the class
    double mass = 0, recall = 0;  // share of p at these distances; share of that mass that lists hold
  };
  int64_t layer = 0;
  double recall = 0;                // share of p that lists hold
  double max_logit = 0;             // largest q.k / sqrt(dk)
  std::vector<Distance> distances;  // those classes at which any row has p > 0
};

class IndexSample {
 public:
  static constexpr int64_t kMostRows = 64;
  // For models with a taught index whose sequences no ranks share. dtype: that of the activations.
  IndexSample(Arena&, const ModelConfig&, DType dtype);

  // Begins a sample of these tokens, numbered in the batch's B*T.
  void begin(Context&, std::span<const int32_t> rows);
  // Measures a layer after its forward, which has made its lists; does nothing in layers without an index. dense: the
  // index learns from dense passes, so that with three branches the keys are those of the window branch.
  void add(Context&, int64_t layer, Activations&, bool dense);
  std::vector<IndexRecall> read(Context&) const;  // by layer, those without an index left out

 private:
  const ModelConfig& config_;
  Tensor rows_;              // [kMostRows] i32
  Tensor mass_, max_logit_;  // [layers] of ListRecall, kMostRows each
  int64_t count_ = 0;        // rows of the sample
};

}  // namespace triad
