#include "model/qkv_views.h"

namespace triad {

namespace {

constexpr int kBranches = 3;

// Hands out the columns of rows [B*T, width] in order, as heads [B,T,heads,width of a head].
class Columns {
 public:
  Columns(const Tensor& rows, int64_t B, int64_t T) : rows_(rows), B_(B), T_(T) {}
  Tensor take(int64_t heads, int64_t width) {
    const Tensor columns = rows_.slice(1, at_, at_ + heads * width);
    at_ += heads * width;
    return columns.view({B_, T_, heads, width});
  }
  void take_pairs(QkvViews& views, int pairs, const ModelConfig& c) {
    views.pairs = rows_.slice(1, at_, at_ + pairs * kv_width(c));
    for (int i = 0; i < pairs; ++i) {
      views.k[i] = take(c.n_kv_groups, c.d_k);
      views.v[i] = take(c.n_kv_groups, c.d_v);
    }
  }

 private:
  Tensor rows_;
  int64_t B_, T_, at_ = 0;
};

}  // namespace

int kv_pairs(const ModelConfig& c, AttentionKind kind) {
  switch (kind) {
    case AttentionKind::nsa:
      return c.nsa.shared_kv ? 1 : kBranches;
    case AttentionKind::dense:
    case AttentionKind::selected:
    case AttentionKind::window:
      return 1;
  }
  return 0;
}

int64_t kv_width(const ModelConfig& c) { return c.n_kv_groups * (c.d_k + c.d_v); }

int64_t qkv_width(const ModelConfig& c, AttentionKind kind) {
  return c.n_heads * c.d_k + kv_pairs(c, kind) * kv_width(c);
}

QkvViews split_qkv(const Tensor& qkv, const ModelConfig& c, AttentionKind kind, int64_t B, int64_t T) {
  Columns columns(qkv, B, T);
  QkvViews views;
  views.q = columns.take(c.n_heads, c.d_k);
  columns.take_pairs(views, kv_pairs(c, kind), c);
  return views;
}

int64_t qk_width(const ModelConfig& c, AttentionKind kind) {
  return (c.n_heads + kv_pairs(c, kind) * c.n_kv_groups) * c.d_k;
}

QkvViews with_qk(QkvViews views, const Tensor& qk) {
  int64_t at = 0;
  const auto replace = [&](Tensor& view) {
    if (view.empty()) return;
    const int64_t width = view.size(2) * view.size(3);
    view = qk.slice(1, at, at + width).view(view.shape());
    at += width;
  };
  replace(views.q);
  for (Tensor& k : views.k) replace(k);
  return views;
}

QkvViews dense_views(const QkvViews& views, int pairs) {
  const auto last = static_cast<size_t>(pairs - 1);
  return {.q = views.q,
          .k = {views.k[last]},
          .v = {views.v[last]},
          .pairs = {},
          .index_q = views.index_q,
          .index_k = views.index_k};
}

int64_t index_width(const ModelConfig& c, int64_t layer) { return (c.n_kv_groups + 1) * c.nsa_at(layer).d_index; }

QkvViews with_index(QkvViews views, const Tensor& index, const ModelConfig& c) {
  Columns columns(index, views.q.size(0), views.q.size(1));
  const int64_t d_index = index.size(1) / (c.n_kv_groups + 1);
  views.index_q = columns.take(c.n_kv_groups, d_index);
  views.index_k = columns.take(1, d_index);
  return views;
}

IndexIn index_in(const QkvViews& views) { return {views.index_q, views.index_k}; }

QkHeads qk_heads(const QkvViews& views) { return {views.q, views.k[0], views.k[1], views.k[2]}; }
ConstQkHeads const_qk_heads(const QkvViews& views) { return {views.q, views.k[0], views.k[1], views.k[2]}; }

NsaIn nsa_in(const QkvViews& views, const Documents& documents) {
  NsaIn in{views.q, {}, {}, documents, index_in(views)};
  for (int b = 0; b < kBranches; ++b) {
    const int pair = views.k[b].empty() ? 0 : b;  // a single pair feeds all branches
    in.k[b] = views.k[pair], in.v[b] = views.v[pair];
  }
  return in;
}

AttendIn dense_in(const QkvViews& views, const Documents& documents) {
  return {views.q, views.k[0], views.v[0], documents};
}

QkvViews split_branch_pairs(const Tensor& pairs, const ModelConfig& c, int64_t B, int64_t T) {
  QkvViews views;
  Columns(pairs, B, T).take_pairs(views, kBranches, c);
  return views;
}

}  // namespace triad
