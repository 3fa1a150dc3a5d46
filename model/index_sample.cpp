#include "model/index_sample.h"

#include <algorithm>
#include <limits>

#include "engine/check.h"
#include "engine/dtype_dispatch.h"

namespace triad {

IndexSample::IndexSample(Arena& arena, const ModelConfig& c, DType dtype)
    : config_(c), rows_(arena.alloc(MemTag::workspace, "sampled rows", DType::i32, {kMostRows})) {
  const DType acc = acc_dtype(dtype);
  mass_ = arena.alloc(MemTag::workspace, "mass of lists", acc, {c.n_layers, kMostRows, c.n_heads, 2, kDistanceClasses});
  max_logit_ = arena.alloc(MemTag::workspace, "largest logits", acc, {c.n_layers, kMostRows, c.n_heads});
}

void IndexSample::begin(Context& ctx, std::span<const int32_t> rows) {
  count_ = static_cast<int64_t>(rows.size());
  TRIAD_CHECK(count_ > 0 && count_ <= kMostRows, "a sample of {} rows: 1 to {}", count_, kMostRows);
  write(ctx, rows_.slice(0, 0, count_), rows.data());
}

void IndexSample::add(Context& ctx, int64_t layer, Activations& act, bool dense) {
  if (!config_.has_index(layer)) return;
  const LayerActivations& a = act.layer(layer);
  const AttentionKind kind = config_.attention_of(layer);
  const QkvViews views = attended_qkv(a, config_, kind, act.B(), act.T());
  const Tensor k = dense ? dense_views(views, kv_pairs(config_, kind)).k[0]
                         : views.k[kv_pairs(config_, kind) == 1 ? 0 : static_cast<size_t>(Branch::sel)];
  nsa_list_recall(ctx, {mass_[layer].slice(0, 0, count_), max_logit_[layer].slice(0, 0, count_)},
                  rows_.slice(0, 0, count_), views.q, k, a.attention.nsa.block_index, config_.nsa_at(layer).l_sel,
                  act.documents_of(layer));
}

std::vector<IndexRecall> IndexSample::read(Context& ctx) const {
  std::vector<IndexRecall> layers;
  const int64_t rows = count_ * config_.n_heads;
  for (int64_t layer = 0; layer < config_.n_layers; ++layer) {
    if (!config_.has_index(layer)) continue;
    IndexRecall r;
    r.layer = layer, r.max_logit = -std::numeric_limits<double>::infinity();
    dispatch_float(mass_.dtype, [&]<class A>() {
      std::vector<A> mass(static_cast<size_t>(rows * 2 * kDistanceClasses)), logits(static_cast<size_t>(rows));
      triad::read(ctx, mass.data(), mass_[layer].slice(0, 0, count_));
      triad::read(ctx, logits.data(), max_logit_[layer].slice(0, 0, count_));
      for (const A logit : logits) r.max_logit = std::max(r.max_logit, static_cast<double>(logit));
      double all = 0, listed = 0;
      for (int64_t c = 0; c < kDistanceClasses; ++c) {
        double all_here = 0, listed_here = 0;
        for (int64_t row = 0; row < rows; ++row) {
          const A* const at = mass.data() + row * 2 * kDistanceClasses + c;
          all_here += at[0], listed_here += at[kDistanceClasses];
        }
        all += all_here, listed += listed_here;
        if (all_here == 0) continue;
        r.distances.push_back({distance_begin(c), all_here / static_cast<double>(rows), listed_here / all_here});
      }
      r.recall = listed / all;
    });
    layers.push_back(std::move(r));
  }
  return layers;
}

}  // namespace triad
