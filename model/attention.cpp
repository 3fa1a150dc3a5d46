#include "model/attention.h"

#include <fmt/format.h>

#include "kernels/nsa/branch_sum.h"
#include "model/sequence/attention.h"

namespace triad {

namespace {

// With runtime.asserts: checks the tensors and lists that nsa_forward wrote.
void expect_sound(Context& ctx, const LayerContext& lc, const NsaSaved& s, ConstTensor out) {
  if (lc.asserts == nullptr) return;
  lc.expect_finite(ctx, {{"nsa_compress", "k_cmp", s.k_cmp},
                         {"nsa_compress", "v_cmp", s.v_cmp},
                         {"nsa_attend_compressed", "o_cmp", s.o[0]}});
  lc.asserts->lists(ctx, lc.layer, "nsa_select", "block_index", s.block_index, lc.config.nsa.l_sel, lc.documents);
  lc.expect_finite(ctx, {{"nsa_attend_selected", "o_sel", s.o[1]},
                         {"nsa_attend_window", "o_win", s.o[2]},
                         {"nsa_gate", "gate", s.gate},
                         {"nsa_combine", "out", out}});
}

constexpr int kBranches = 3;

// Hands out columns in rows [B*T, width] in order, as heads [B,T,heads,head width].
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

Shape out_shape(const LayerContext& lc) { return {lc.B, lc.T, lc.config.n_heads, lc.config.d_v}; }

}  // namespace

int kv_pairs(const ModelConfig& c, AttentionKind kind) {
  switch (kind) {
    case AttentionKind::nsa:
      return c.nsa.shared_kv ? 1 : kBranches;
    case AttentionKind::dense:
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
  return {.q = views.q, .k = {views.k[last]}, .v = {views.v[last]}, .pairs = {}};
}

QkHeads qk_heads(const QkvViews& views) { return {views.q, views.k[0], views.k[1], views.k[2]}; }
ConstQkHeads const_qk_heads(const QkvViews& views) { return {views.q, views.k[0], views.k[1], views.k[2]}; }

NsaIn nsa_in(const QkvViews& views, const Documents& documents) {
  NsaIn in{views.q, {}, {}, documents};
  for (int b = 0; b < kBranches; ++b) {
    const int pair = views.k[b].empty() ? 0 : b;  // a single pair feeds all branches
    in.k[b] = views.k[pair], in.v[b] = views.v[pair];
  }
  return in;
}

AttendIn dense_in(const QkvViews& views, const Documents& documents) {
  return {views.q, views.k[0], views.v[0], documents};
}

AttentionSaved alloc_attention(const ModelConfig& c, AttentionKind kind, int64_t B, int64_t T, int64_t row_tokens,
                               DType dtype, const AllocTensor& kept, const AllocTensor& alloc) {
  const DType acc = acc_dtype(dtype);
  const Shape o = {B, T, c.n_heads, c.d_v}, lse = {B, T, c.n_heads};
  AttentionSaved saved;
  switch (kind) {
    case AttentionKind::dense:
      saved.dense = {alloc("o", dtype, o), alloc("lse", acc, lse)};
      break;
    case AttentionKind::nsa: {
      NsaSaved& s = saved.nsa;
      s.block_index = kept("block_index", DType::i32, {B, T, c.n_kv_groups, c.nsa.n_sel});
      for (int b = 0; b < 3; ++b) {
        const std::string_view branch = word_of(static_cast<Branch>(b));
        s.o[b] = alloc(fmt::format("o_{}", branch), dtype, o);
        s.lse[b] = alloc(fmt::format("lse_{}", branch), acc, lse);
      }
      const int64_t Tc = compressed_length(row_tokens, c.nsa.l, c.nsa.d);
      s.k_cmp = alloc("k_cmp", dtype, {B, Tc, c.n_kv_groups, c.d_k});
      s.v_cmp = alloc("v_cmp", dtype, {B, Tc, c.n_kv_groups, c.d_v});
      s.gate = alloc("gate", acc, {3, B, T, c.n_kv_groups});
      constexpr auto kWindow = static_cast<size_t>(Branch::win);
      saved.dense = {s.o[kWindow], s.lse[kWindow]};
      break;
    }
  }
  return saved;
}

Tensor attend_forward(Context& ctx, const LayerContext& lc, const NsaWeights& w, const QkvViews& in,
                      const AttentionSaved& saved, Scratch::Scope& scope) {
  switch (lc.attention()) {
    case AttentionKind::dense:
      if (lc.group != nullptr)
        context_dense_forward(ctx, lc, saved.dense, in);
      else
        dense_attention_forward(ctx, saved.dense, dense_in(in, lc.documents));
      lc.expect_finite(ctx, {{"dense_attention", "o", saved.dense.o}});
      return saved.dense.o;
    case AttentionKind::nsa: {
      const NsaSaved& s = saved.nsa;
      const Tensor out = scope.alloc(in.q.dtype, out_shape(lc), "attention");
      if (lc.group != nullptr)
        context_nsa_forward(ctx, lc, out, s, in, w);
      else
        nsa_forward(ctx, out, s, nsa_in(in, lc.documents), w, lc.config.nsa, lc.keep_block_index);
      if (lc.stats != nullptr) lc.stats->add(ctx, lc.layer, s.gate, s.block_index, lc.documents);
      expect_sound(ctx, lc, s, out);
      return out;
    }
  }
  return {};
}

namespace {

void nsa_backward_of_layer(Context& ctx, const LayerContext& lc, const NsaGrad& grad, const NsaWeightGrads& dw,
                           ConstTensor dout, const QkvViews& in, const NsaSaved& saved, const NsaWeights& w) {
  if (lc.group != nullptr) return context_nsa_backward(ctx, lc, grad, dw, dout, in, saved, w);
  nsa_backward(ctx, grad, dw, dout, nsa_in(in, lc.documents), saved, w, lc.config.nsa);
}

}  // namespace

AttentionGrads attend_backward(Context& ctx, const LayerContext& lc, const QkvViews& din, const NsaWeightGrads& dw,
                               ConstTensor dout, const QkvViews& in, const AttentionSaved& saved, const NsaWeights& w,
                               UnusedMemory& memory) {
  const DType acc = acc_dtype(in.q.dtype);
  AttentionGrads grads;
  grads.dq = memory.alloc(acc, in.q.shape(), "dq");
  switch (lc.attention()) {
    case AttentionKind::dense:
      grads.out = saved.dense.o;
      if (lc.group != nullptr)
        context_dense_backward(ctx, lc, {grads.dq, din.k[0], din.v[0]}, dout, in, saved.dense);
      else
        dense_attention_backward(ctx, {grads.dq, din.k[0], din.v[0]}, dout, dense_in(in, lc.documents), saved.dense);
      lc.expect_finite(ctx, {{"dense_attention backward", "dq", grads.dq}});
      break;
    case AttentionKind::nsa:
      grads.out = memory.alloc(in.q.dtype, out_shape(lc), "attention");
      grads.dq_group = memory.alloc(acc, in.k[0].shape(), "dq_group");
      if (lc.config.nsa.shared_kv) {
        Scratch::Scope inner(ctx.scratch);
        const Tensor parts = inner.alloc(in.q.dtype, {lc.B * lc.T, kBranches * kv_width(lc.config)}, "dk, dv");
        QkvViews branch_views;
        Columns(parts, lc.B, lc.T).take_pairs(branch_views, kBranches, lc.config);
        nsa_backward_of_layer(ctx, lc, {grads.dq, grads.dq_group, branch_views.k, branch_views.v, grads.out}, dw, dout,
                              in, saved.nsa, w);
        branch_sum(ctx, din.pairs, parts);
      } else {
        nsa_backward_of_layer(ctx, lc, {grads.dq, grads.dq_group, din.k, din.v, grads.out}, dw, dout, in, saved.nsa, w);
      }
      lc.expect_finite(
          ctx, {{"nsa_gate backward", "dq_group", grads.dq_group}, {"backward of the branches", "dq", grads.dq}});
      break;
  }
  return grads;
}

}  // namespace triad
