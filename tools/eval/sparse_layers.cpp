#include "tools/eval/sparse_layers.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

namespace triad {

ModelConfig with_sparse_layer(ModelConfig config, int64_t layer) {
  const auto range = [](int64_t begin, int64_t end) { return begin < end ? fmt::format("{}:{}", begin, end) : ""; };
  const std::string before = range(0, layer), after = range(layer + 1, config.n_layers);
  config.attention = AttentionKind::nsa;
  config.dense_layers = before + (before.empty() || after.empty() ? "" : ",") + after;
  config.resolve();
  return config;
}

std::vector<SparseLayer> evaluate_sparse_layers(const LossOptions& o, const ModelSource& model,
                                                const Tokenizer& tokenizer, const TokenSource& source) {
  std::vector<SparseLayer> layers;
  for (int64_t i = 0; i < model.config.model.n_layers; ++i)
    layers.push_back({i, evaluate(o, model, tokenizer, source, with_sparse_layer(model.config.model, i)).mean()});
  std::stable_sort(layers.begin(), layers.end(),
                   [](const SparseLayer& a, const SparseLayer& b) { return a.loss > b.loss; });
  return layers;
}

}  // namespace triad
