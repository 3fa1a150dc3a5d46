// triad eval --sparse-layers: what a dense model loses if one of its layers attends with NSA.
#pragma once
#include <vector>

#include "tools/eval/loss.h"

namespace triad {

// A dense model with NSA in one layer alone. Throws a UsageError if its shape is impossible for NSA.
ModelConfig with_sparse_layer(ModelConfig, int64_t layer);

// The mean loss with NSA in one layer alone.
struct SparseLayer {
  int64_t layer = 0;
  double loss = 0;
};
// By loss, the largest first.
std::vector<SparseLayer> evaluate_sparse_layers(const LossOptions&, const ModelSource&, const Tokenizer&,
                                                const TokenSource&);

}  // namespace triad
