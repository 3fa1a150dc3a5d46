#include "tools/bench/attention_parts.h"

#include "kernels/common/op_case_args.h"
#include "kernels/nsa/select_index.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

// Allocates the tensors that dense attention does not need: NSA's output, its weights and their gradients, and the
// tensors that one part writes and another reads.
void allocate_nsa(AttentionTensors& t, Arena& arena, const AttentionProblem& p, DType dtype) {
  const ModelConfig& c = p.config;
  const DType acc = acc_dtype(dtype);
  const int64_t B = p.B, T = p.T, Hq = c.n_heads, Hkv = c.n_kv_groups, l = c.nsa.l;
  const auto alloc = [&](const char* name, DType type, const Shape& shape) {
    return arena.alloc(MemTag::activations, name, type, shape);
  };
  const NsaSaved& s = t.saved.nsa;
  t.out = alloc("out", dtype, {B, T, Hq, c.d_v});
  t.delta = alloc("delta", acc, {3, B, T, Hq});
  t.rounding_unit = alloc("rounding_unit", acc, {B, T, Hq});
  t.dk_cmp = alloc("dk_cmp", acc, s.k_cmp.shape());
  t.dv_cmp = alloc("dv_cmp", acc, s.v_cmp.shape());
  t.dq_group = alloc("dq of groups", acc, {B, T, Hkv, c.d_k});
  t.dgate = alloc("dgate", acc, s.gate.shape());
  const auto weight = [&](ConstTensor& w, Tensor& dw, const Shape& shape) {
    t.drawn_weights.push_back(alloc("weight", dtype, shape));
    w = t.drawn_weights.back();
    dw = alloc("weight gradient", acc, shape);
  };
  const auto phi = [&](PhiWeights& w, PhiGrads& dw, int64_t D) {
    if (c.nsa.phi == Phi::conv) weight(w.w, dw.w, {l, D});
    if (c.nsa.phi != Phi::mlp) return;
    weight(w.pos, dw.pos, {l, D});
    weight(w.fc1, dw.fc1, {2 * D, l * D});
    weight(w.fc2, dw.fc2, {D, 2 * D});
  };
  phi(t.weights.phi_k, t.weight_grads.phi_k, c.d_k);
  phi(t.weights.phi_v, t.weight_grads.phi_v, c.d_v);
  weight(t.weights.gate.fc1_w, t.weight_grads.gate.fc1_w, {c.d_k / 2, c.d_k});
  weight(t.weights.gate.fc1_b, t.weight_grads.gate.fc1_b, {c.d_k / 2});
  weight(t.weights.gate.fc2_w, t.weight_grads.gate.fc2_w, {3, c.d_k / 2});
  weight(t.weights.gate.fc2_b, t.weight_grads.gate.fc2_b, {3});
}

// One head's attended pairs: the sum over all documents divided by the sequence count.
AttendedPairs mean_pairs(const AttentionProblem& p) {
  const ModelConfig& c = p.config;
  if (p.bounds.empty()) return attended_pairs(c, p.kind(), p.T);
  AttendedPairs sum;
  for (size_t i = 1; i < p.bounds.size(); ++i) {
    const AttendedPairs one = attended_pairs(c, p.kind(), p.bounds[i] - p.bounds[i - 1]);
    sum.cmp += one.cmp, sum.sel += one.sel, sum.win += one.win, sum.dense += one.dense, sum.index += one.index;
  }
  const double B = static_cast<double>(p.B);
  return {sum.cmp / B, sum.sel / B, sum.win / B, sum.dense / B, sum.index / B};
}

}  // namespace

int64_t saved_bytes(const AttentionSaved& saved) {
  const NsaSaved& s = saved.nsa;
  int64_t bytes = 0;
  for (const Tensor& t : {s.k_cmp, s.v_cmp, s.block_index, s.gate, s.o[0], s.o[1], s.o[2], s.lse[0], s.lse[1], s.lse[2],
                          saved.dense.o, saved.dense.lse, s.index_lse})
    if (!t.empty()) bytes += t.bytes();
  return bytes;
}

// The config with separate k and v for each branch: kernels write their gradients to separate places, also where the
// branches share one pair (the model then adds them).
ModelConfig separate(ModelConfig c) {
  c.nsa.shared_kv = false;
  return c;
}

AttentionTensors allocate_attention(Arena& arena, const AttentionProblem& p, DType dtype, int64_t row_tokens) {
  const ModelConfig& c = p.config;
  const int64_t B = p.B, T = p.T, Hq = c.n_heads, width = qkv_width(c, p.kind());
  const AllocTensor alloc = [&](const std::string& name, DType type, const Shape& shape) {
    return arena.alloc(MemTag::activations, name, type, shape);
  };
  AttentionTensors t;
  t.qkv = alloc("qkv", dtype, {B * T, width});
  t.dqkv = alloc("dqkv", dtype, {B * T, qkv_width(separate(c), p.kind())});
  t.dout = alloc("dout", dtype, {B, T, Hq, c.d_v});
  t.dq = alloc("dq", acc_dtype(dtype), {B, T, Hq, c.d_k});
  t.saved = alloc_attention(c, 0, B, T, row_tokens, dtype, alloc, alloc);
  if (p.kind() == AttentionKind::nsa) allocate_nsa(t, arena, p, dtype);
  if (c.has_index()) {
    t.index = alloc("index", dtype, {B * T, index_width(c, 0)});
    t.dindex = alloc("dindex", dtype, t.index.shape());
    t.index_dq = alloc("dq of the index", acc_dtype(dtype), {B, T, c.n_kv_groups, c.nsa.d_index});
    t.index_loss = alloc("index loss", DType::f64, {1});
  }
  if (!p.bounds.empty()) {
    const auto table = [&](const char* name, const Shape& shape) { return alloc(name, DType::i32, shape); };
    t.bounds = table("bounds", {static_cast<int64_t>(p.bounds.size())});
    t.documents = {table("begin", {B, p.T}), table("end", {B, p.T}), table("first_block", {B, p.T}),
                   table("block_begin", {B, block_ids(p.T, c.nsa.l_sel, p.most_documents())})};
  }
  return t;
}

AttentionParts::AttentionParts(Device device, const AttentionProblem& p, const AttentionTensors& t, DType dtype)
    : p_(p), c_(p.config), t_(t), element_(static_cast<double>(size_of(dtype))), pairs_(mean_pairs(p)) {
  const QkvViews views = split_qkv(t.qkv, c_, p.kind(), p.B, p.T),
                 dviews = split_qkv(t.dqkv, separate(c_), p.kind(), p.B, p.T);
  if (!p.bounds.empty()) add_document_tables();
  if (c_.has_index()) {
    const QkvViews from = with_index(views, t.index, c_), to = with_index(views, t.dindex, c_);
    index_ = {from.index_q, from.index_k};
    index_grad_ = {index_, t.saved.nsa.index_lse, t.index_dq, to.index_k, t.index_loss};
  }
  switch (p.kind()) {
    case AttentionKind::dense:
      add_dense(dense_in(views, t.documents), {t.dq, dviews.k[0], dviews.v[0]});
      break;
    case AttentionKind::window:
      add_window(dense_in(views, t.documents), {t.dq, dviews.k[0], dviews.v[0]});
      break;
    case AttentionKind::selected:
      add_selected(dense_in(views, t.documents), {t.dq, dviews.k[0], dviews.v[0]});
      break;
    case AttentionKind::nsa: {
      in_ = nsa_in(views, t.documents);
      in_.index = index_;
      grad_ = {t.dq, t.dq_group, dviews.k, dviews.v, {}, c_.has_index() ? &index_grad_ : nullptr};
      Runtime dry({.device = device, .planning = true});
      Scratch::Scope scope(dry.scratch());
      has_rounding_unit_ = !make_rounding_unit(dry.ctx(), scope).empty();
      add_nsa_forward();
      add_nsa_backward();
      break;
    }
  }
}

Tensor AttentionParts::make_rounding_unit(Context& ctx, Scratch::Scope& scope) const {
  const NsaSaved& s = t_.saved.nsa;
  return attend_rounding_unit(ctx, scope, t_.dq, t_.dout, in_.q,
                              {{s.k_cmp, s.v_cmp, s.gate[kCmp], t_.delta[kCmp], c_.nsa.d},
                               {in_.k[kSel], in_.v[kSel], s.gate[kSel], t_.delta[kSel]},
                               {in_.k[kWin], in_.v[kWin], s.gate[kWin], t_.delta[kWin]}},
                              {}, {}, in_.documents);
}

void AttentionParts::add_document_tables() {
  add("documents", true, 0, keys(12) / static_cast<double>(c_.n_kv_groups),
      [this](Context& ctx) { nsa_document_tables(ctx, t_.documents, t_.bounds, c_.nsa.l_sel); });
}

void AttentionParts::add_nsa_forward() {
  const NsaConfig& n = c_.nsa;
  const PhiOptions phi = n.phi_options();
  const NsaSaved& s = t_.saved.nsa;
  const auto upstream = [this](int b) {
    return AttendGradIn{t_.dout, t_.saved.nsa.gate[b], t_.delta[b], t_.saved.nsa.lse[b], rounding_unit()};
  };
  const double widths = dk() + dv();

  add("compress", true, 0, element_ * (keys(widths) + compressed(widths)), [=, this](Context& ctx) {
    nsa_compress_forward(ctx, t_.saved.nsa.k_cmp, in_.k[kCmp], t_.weights.phi_k, phi, in_.documents);
    nsa_compress_forward(ctx, t_.saved.nsa.v_cmp, in_.v[kCmp], t_.weights.phi_v, phi, in_.documents);
  });
  add_branch(
      "compressed", pairs_.cmp, compressed(widths),
      [=, this](Context& ctx) {
        nsa_attend_compressed_forward(ctx, {s.o[kCmp], s.lse[kCmp]}, branch_in(kCmp), n);
      },
      [=, this](Context& ctx) {
        nsa_attend_compressed_backward(ctx, {t_.dq, t_.dk_cmp, t_.dv_cmp}, upstream(kCmp), branch_in(kCmp), n);
      });
  const double select_flops = c_.has_index() ? 0 : products(pairs_.cmp, dk());
  if (c_.has_index())
    add_index();
  else
    add("select", true, select_flops,
        element_ * (rows(dk()) + compressed(dk())) + rows(4) + keys(4.0 * static_cast<double>(n.n_sel)),
        [=, this](Context& ctx) { nsa_select(ctx, s.block_index, in_.q, s.k_cmp, s.lse[kCmp], n, in_.documents); });
  add_branch(
      "selected", pairs_.sel, keys(widths),
      [=, this](Context& ctx) {
        nsa_attend_selected_forward(ctx, {s.o[kSel], s.lse[kSel]}, branch_in(kSel), s.block_index, n.l_sel);
      },
      [=, this](Context& ctx) {
        nsa_attend_selected_backward(ctx, {t_.dq, grad_.k[kSel], grad_.v[kSel]}, upstream(kSel), branch_in(kSel),
                                     s.block_index, n.l_sel);
      });
  add_branch(
      "window", pairs_.win, keys(widths),
      [=, this](Context& ctx) {
        nsa_attend_window_forward(ctx, {s.o[kWin], s.lse[kWin]}, branch_in(kWin), n.w);
      },
      [=, this](Context& ctx) {
        nsa_attend_window_backward(ctx, {t_.dq, grad_.k[kWin], grad_.v[kWin]}, upstream(kWin), branch_in(kWin), n.w);
      });
  add("gate", true, 0, element_ * rows(dk()) + keys(12),
      [=, this](Context& ctx) { nsa_gate_forward(ctx, s.gate, in_.q, t_.weights.gate, n.gate); });
  add("combine", true, 0, element_ * rows(4 * dv()) + keys(12),
      [=, this](Context& ctx) { nsa_combine_forward(ctx, t_.out, branch_outputs(), s.gate); });
  add("nsa", true,
      products(pairs_.cmp + pairs_.sel + pairs_.win, widths) + select_flops + index_products(pairs_.index) +
          (c_.has_index() ? index_products(pairs_.sel) : 0),
      element_ * (rows(dk() + 4 * dv()) + 3 * keys(widths)) + rows(12),
      [=, this](Context& ctx) { nsa_forward(ctx, t_.out, s, in_, t_.weights, n); });
}

void AttentionParts::add_nsa_backward() {
  const NsaConfig& n = c_.nsa;
  const PhiOptions phi = n.phi_options();
  const NsaSaved& s = t_.saved.nsa;
  const double widths = dk() + dv();

  add("combine", false, 0, element_ * rows(4 * dv()) + keys(24) + rows(12),
      [=, this](Context& ctx) { nsa_combine_backward(ctx, t_.dgate, t_.delta, t_.dout, branch_outputs(), s.gate); });
  // This part copies the rounding unit to a tensor that later parts read, because its scratch is released at its end.
  // The copy is small; nsa_backward has none.
  if (has_rounding_unit_)
    add("rounding_unit", false, 0, element_ * (rows(dk() + dv()) + 3 * keys(widths)) + rows(12),
        [=, this](Context& ctx) {
          Scratch::Scope scope(ctx.scratch);
          copy(ctx, t_.rounding_unit, make_rounding_unit(ctx, scope));
        });
  parts_.insert(parts_.end(), backward_.begin(), backward_.end());
  add("compress", false, 0, element_ * keys(widths) + 4 * compressed(widths), [=, this](Context& ctx) {
    nsa_compress_backward(ctx, grad_.k[kCmp], t_.weight_grads.phi_k, t_.dk_cmp, in_.k[kCmp], t_.weights.phi_k, phi,
                          in_.documents);
    nsa_compress_backward(ctx, grad_.v[kCmp], t_.weight_grads.phi_v, t_.dv_cmp, in_.v[kCmp], t_.weights.phi_v, phi,
                          in_.documents);
  });
  add("gate", false, 0, element_ * rows(dk()) + keys(24 + 4 * dk()), [=, this](Context& ctx) {
    nsa_gate_backward(ctx, t_.dq_group, t_.weight_grads.gate, t_.dgate, s.gate, in_.q, t_.weights.gate, n.gate);
  });
  add("nsa", false,
      products(pairs_.cmp + pairs_.sel + pairs_.win, 3 * dk() + 2 * dv()) +
          (c_.has_index() ? index_products(3 * pairs_.sel) : 0),
      element_ * (rows(dk() + 4 * dv()) + 6 * keys(widths)) + rows(12 + 4 * dk()),
      [=, this](Context& ctx) { nsa_backward(ctx, grad_, t_.weight_grads, t_.dout, in_, s, t_.weights, n); });
}

void AttentionParts::add_dense(const AttendIn& in, const DenseGrad& grad) {
  const DenseSaved& saved = t_.saved.dense;
  add_branch(
      "dense", pairs_.dense, keys(dk() + dv()), [=](Context& ctx) { dense_attention_forward(ctx, saved, in); },
      [=, this](Context& ctx) { dense_attention_backward(ctx, grad, t_.dout, in, saved); });
  parts_.insert(parts_.end(), backward_.begin(), backward_.end());
}

void AttentionParts::add_window(const AttendIn& in, const DenseGrad& grad) {
  const DenseSaved& saved = t_.saved.dense;
  const int64_t w = c_.nsa.w;
  add_branch(
      "window", pairs_.win, keys(dk() + dv()), [=](Context& ctx) { window_attention_forward(ctx, saved, in, w); },
      [=, this](Context& ctx) { window_attention_backward(ctx, grad, t_.dout, in, saved, w); });
  parts_.insert(parts_.end(), backward_.begin(), backward_.end());
}

// The selection by a taught index.
void AttentionParts::add_index() {
  const double width = static_cast<double>(c_.nsa.d_index), groups = static_cast<double>(c_.n_kv_groups);
  add("index", true, index_products(pairs_.index),
      element_ * keys(width) * (1 + 1 / groups) + keys(4.0 * static_cast<double>(c_.nsa.n_sel)), [this](Context& ctx) {
        nsa_select_index(ctx, t_.saved.nsa.block_index, index_.q, index_.k, c_.nsa, t_.documents);
      });
}

// "selected" is the selected branch without the index's lse, loss and gradients, "sel" the whole with them.
void AttentionParts::add_selected(const AttendIn& in, const DenseGrad& grad) {
  const NsaConfig& n = c_.nsa;
  const NsaSaved& lists = t_.saved.nsa;
  const SelectedSaved untaught{lists.block_index, t_.saved.dense.o, t_.saved.dense.lse},
      saved{lists.block_index, t_.saved.dense.o, t_.saved.dense.lse, lists.index_lse};
  const double widths = dk() + dv(), index_rows = keys(static_cast<double>(n.d_index));
  add_index();
  add_branch(
      "selected", pairs_.sel, keys(widths),
      [=, this](Context& ctx) { selected_attention_forward(ctx, untaught, in, index_, n, /*keep_block_index=*/true); },
      [=, this](Context& ctx) { selected_attention_backward(ctx, grad, t_.dout, in, untaught, n.l_sel); });
  add("sel", true, products(pairs_.sel, widths) + index_products(pairs_.index + pairs_.sel),
      element_ * (rows(widths) + keys(widths) + index_rows) + rows(4),
      [=, this](Context& ctx) { selected_attention_forward(ctx, saved, in, index_, n); });
  parts_.insert(parts_.end(), backward_.begin(), backward_.end());
  add("sel", false, products(pairs_.sel, 3 * dk() + 2 * dv()) + index_products(3 * pairs_.sel),
      element_ * (rows(2 * dk() + 3 * dv()) + 2 * keys(widths) + 2 * index_rows) + rows(8),
      [=, this](Context& ctx) { selected_attention_backward(ctx, grad, t_.dout, in, saved, n.l_sel, &index_grad_); });
}

}  // namespace triad
