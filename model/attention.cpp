#include "model/attention.h"

#include <fmt/format.h>

#include "kernels/nsa/branch_sum.h"

namespace triad {

namespace {

// With runtime.asserts: checks the tensors and lists that nsa_forward wrote.
void expect_sound(Context& ctx, const LayerContext& lc, const NsaSaved& s, ConstTensor out) {
  if (lc.asserts == nullptr) return;
  lc.expect_finite(ctx, {{"nsa_compress", "k_cmp", s.k_cmp},
                         {"nsa_compress", "v_cmp", s.v_cmp},
                         {"nsa_attend_compressed", "o_cmp", s.o[0]}});
  lc.asserts->lists(ctx, lc.layer, "nsa_select", "block_index", s.block_index, lc.nsa().l_sel, lc.documents);
  lc.expect_finite(ctx, {{"nsa_attend_selected", "o_sel", s.o[1]},
                         {"nsa_attend_window", "o_win", s.o[2]},
                         {"nsa_gate", "gate", s.gate},
                         {"nsa_combine", "out", out}});
}

constexpr int kBranches = 3;

// The index's lse that this forward computes; absent if it computes none.
Tensor taught_lse(const LayerContext& lc, const AttentionSaved& saved) {
  return lc.teaches_index ? saved.nsa.index_lse : Tensor{};
}

SelectedSaved selected_saved(const LayerContext& lc, const AttentionSaved& saved) {
  return {saved.nsa.block_index, saved.dense.o, saved.dense.lse, taught_lse(lc, saved)};
}

Shape out_shape(const LayerContext& lc) { return {lc.B, lc.T, lc.config.n_heads, lc.config.d_v}; }

// The attention of a rank that holds whole sequences.
class WholeSequences : public AttentionExec {
 public:
  void nsa_forward(Context& ctx, const LayerContext& lc, Tensor out, const NsaSaved& s, const QkvViews& in,
                   const NsaWeights& w) const override {
    triad::nsa_forward(ctx, out, s, nsa_in(in, lc.documents), w, lc.nsa(), lc.keep_block_index);
  }
  void nsa_backward(Context& ctx, const LayerContext& lc, const NsaGrad& grad, const NsaWeightGrads& dw,
                    ConstTensor dout, const QkvViews& in, const NsaSaved& s, const NsaWeights& w) const override {
    triad::nsa_backward(ctx, grad, dw, dout, nsa_in(in, lc.documents), s, w, lc.nsa());
  }
  void dense_forward(Context& ctx, const LayerContext& lc, const DenseSaved& s, const QkvViews& in,
                     const IndexForward* index) const override {
    dense_attention_forward(ctx, s, dense_in(in, lc.documents), index);
  }
  void dense_backward(Context& ctx, const LayerContext& lc, const DenseGrad& grad, ConstTensor dout, const QkvViews& in,
                      const DenseSaved& s, const IndexBackward* index) const override {
    dense_attention_backward(ctx, grad, dout, dense_in(in, lc.documents), s, index);
  }
  void selected_forward(Context& ctx, const LayerContext& lc, const SelectedSaved& s,
                        const QkvViews& in) const override {
    selected_attention_forward(ctx, s, dense_in(in, lc.documents), index_in(in), lc.nsa(), lc.keep_block_index);
  }
  void selected_backward(Context& ctx, const LayerContext& lc, const DenseGrad& grad, ConstTensor dout,
                         const QkvViews& in, const SelectedSaved& s, const IndexBackward* index) const override {
    selected_attention_backward(ctx, grad, dout, dense_in(in, lc.documents), s, lc.nsa().l_sel, index);
  }
  void window_forward(Context& ctx, const LayerContext& lc, const DenseSaved& s, const QkvViews& in) const override {
    window_attention_forward(ctx, s, dense_in(in, lc.documents), lc.nsa().w);
  }
  void window_backward(Context& ctx, const LayerContext& lc, const DenseGrad& grad, ConstTensor dout,
                       const QkvViews& in, const DenseSaved& s) const override {
    window_attention_backward(ctx, grad, dout, dense_in(in, lc.documents), s, lc.nsa().w);
  }
};

}  // namespace

std::unique_ptr<const AttentionExec> whole_sequences() { return std::make_unique<WholeSequences>(); }

AttentionSaved alloc_attention(const ModelConfig& c, int64_t layer, int64_t B, int64_t T, int64_t row_tokens,
                               DType dtype, const AllocTensor& kept, const AllocTensor& alloc) {
  const DType acc = acc_dtype(dtype);
  const Shape o = {B, T, c.n_heads, c.d_v}, lse = {B, T, c.n_heads};
  const NsaConfig& options = c.nsa_at(layer);
  AttentionSaved saved;
  const auto keep_lists = [&] {
    saved.nsa.block_index = kept("block_index", DType::i32, {B, T, c.n_kv_groups, options.n_sel});
    if (c.has_index(layer)) saved.nsa.index_lse = kept("index_lse", acc, {B, T, c.n_kv_groups});
  };
  switch (c.attention_of(layer)) {
    case AttentionKind::selected:
      keep_lists();
      [[fallthrough]];
    case AttentionKind::dense:
    case AttentionKind::window:
      saved.dense = {alloc("o", dtype, o), alloc("lse", acc, lse)};
      break;
    case AttentionKind::nsa: {
      NsaSaved& s = saved.nsa;
      keep_lists();
      for (int b = 0; b < 3; ++b) {
        const std::string_view branch = word_of(static_cast<Branch>(b));
        s.o[b] = alloc(fmt::format("o_{}", branch), dtype, o);
        s.lse[b] = alloc(fmt::format("lse_{}", branch), acc, lse);
      }
      const int64_t Tc = compressed_length(row_tokens, options.l, options.d);
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
  const Tensor index_lse = taught_lse(lc, saved);
  const auto expect_sound_index = [&] { lc.expect_finite(ctx, {{"nsa_index_forward", "index_lse", index_lse}}); };
  switch (lc.attention()) {
    case AttentionKind::dense: {
      const IndexForward index{index_in(in), index_lse};
      lc.exec.dense_forward(ctx, lc, saved.dense, in, index_lse.empty() ? nullptr : &index);
      lc.expect_finite(ctx, {{"dense_attention", "o", saved.dense.o}});
      expect_sound_index();
      return saved.dense.o;
    }
    case AttentionKind::selected: {
      const SelectedSaved s = selected_saved(lc, saved);
      lc.exec.selected_forward(ctx, lc, s, in);
      if (lc.stats != nullptr) lc.stats->add(ctx, lc.layer, {}, s.block_index, lc.documents);
      if (lc.asserts != nullptr)
        lc.asserts->lists(ctx, lc.layer, "nsa_select_index", "block_index", s.block_index, lc.nsa().l_sel,
                          lc.documents);
      lc.expect_finite(ctx, {{"nsa_attend_selected", "o", s.o}});
      expect_sound_index();
      return s.o;
    }
    case AttentionKind::window:
      lc.exec.window_forward(ctx, lc, saved.dense, in);
      lc.expect_finite(ctx, {{"nsa_attend_window", "o", saved.dense.o}});
      return saved.dense.o;
    case AttentionKind::nsa: {
      NsaSaved s = saved.nsa;
      s.index_lse = index_lse;
      const Tensor out = scope.alloc(in.q.dtype, out_shape(lc), "attention");
      lc.exec.nsa_forward(ctx, lc, out, s, in, w);
      if (lc.stats != nullptr) lc.stats->add(ctx, lc.layer, s.gate, s.block_index, lc.documents);
      expect_sound(ctx, lc, s, out);
      expect_sound_index();
      return out;
    }
  }
  return {};
}

AttentionGrads attend_backward(Context& ctx, const LayerContext& lc, const QkvViews& din, const NsaWeightGrads& dw,
                               ConstTensor dout, const QkvViews& in, const AttentionSaved& saved, const NsaWeights& w,
                               UnusedMemory& memory) {
  const DType acc = acc_dtype(in.q.dtype);
  AttentionGrads grads;
  grads.dq = memory.alloc(acc, in.q.shape(), "dq");
  IndexBackward taught;
  const IndexBackward* index = nullptr;
  if (!in.index_q.empty()) {
    grads.index_dq = memory.alloc(acc, in.index_q.shape(), "dq of the index");
    taught = {.in = index_in(in),
              .lse = saved.nsa.index_lse,
              .dq = grads.index_dq,
              .dk = din.index_k,
              .loss = lc.index_loss.slice(0, lc.layer, lc.layer + 1),
              .scale = lc.index_scale,
              .padding_begin = lc.padding_begin};
    index = &taught;
  }
  switch (lc.attention()) {
    case AttentionKind::dense:
      grads.out = saved.dense.o;
      lc.exec.dense_backward(ctx, lc, {grads.dq, din.k[0], din.v[0]}, dout, in, saved.dense, index);
      lc.expect_finite(ctx, {{"dense_attention backward", "dq", grads.dq}});
      break;
    case AttentionKind::selected:
      grads.out = saved.dense.o;
      lc.exec.selected_backward(ctx, lc, {grads.dq, din.k[0], din.v[0]}, dout, in, selected_saved(lc, saved), index);
      lc.expect_finite(ctx, {{"nsa_attend_selected backward", "dq", grads.dq}});
      break;
    case AttentionKind::window:
      grads.out = saved.dense.o;
      lc.exec.window_backward(ctx, lc, {grads.dq, din.k[0], din.v[0]}, dout, in, saved.dense);
      lc.expect_finite(ctx, {{"nsa_attend_window backward", "dq", grads.dq}});
      break;
    case AttentionKind::nsa:
      grads.out = memory.alloc(in.q.dtype, out_shape(lc), "attention");
      grads.dq_group = memory.alloc(acc, in.k[0].shape(), "dq_group");
      if (lc.config.nsa.shared_kv) {
        Scratch::Scope inner(ctx.scratch);
        const Tensor pairs = inner.alloc(in.q.dtype, {lc.B * lc.T, kBranches * kv_width(lc.config)}, "dk, dv");
        const QkvViews dbranches = split_branch_pairs(pairs, lc.config, lc.B, lc.T);
        lc.exec.nsa_backward(ctx, lc, {grads.dq, grads.dq_group, dbranches.k, dbranches.v, grads.out, index}, dw, dout,
                             in, saved.nsa, w);
        branch_sum(ctx, din.pairs, pairs);
      } else {
        lc.exec.nsa_backward(ctx, lc, {grads.dq, grads.dq_group, din.k, din.v, grads.out, index}, dw, dout, in,
                             saved.nsa, w);
      }
      lc.expect_finite(
          ctx, {{"nsa_gate backward", "dq_group", grads.dq_group}, {"backward of the branches", "dq", grads.dq}});
      break;
  }
  lc.expect_finite(ctx, {{"nsa_index_backward", "dq of the index", grads.index_dq}});
  return grads;
}

}  // namespace triad
