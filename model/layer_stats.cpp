#include "model/layer_stats.h"

namespace triad {

LayerStats::LayerStats(Arena& arena, const ModelConfig& c, Tensor result)
    : pieces_(arena.alloc(MemTag::workspace, "pieces of gates and lists", DType::f64,
                          {c.n_layers, kStatsPieces, NsaStats::count})),
      result_(result) {
  for (int64_t i = 0; i < c.n_layers; ++i) select_.push_back(c.nsa_at(i));
}

void LayerStats::clear(Context& ctx) { zero(ctx, pieces_); }

void LayerStats::add(Context& ctx, int64_t layer, ConstTensor gate, ConstTensor block_index,
                     const Documents& documents) {
  nsa_stats(ctx, pieces_[layer], gate, block_index, select_[static_cast<size_t>(layer)], documents);
}

void LayerStats::finish(Context& ctx) { nsa_stats_merge(ctx, result_, pieces_); }

}  // namespace triad
