#include "tools/bench/attention_parts.h"

#include "kernels/common/op_case_args.h"
#include "model/flops.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

}  // namespace

int64_t saved_bytes(const NsaSaved& s) {
  int64_t bytes = 0;
  for (const Tensor& t :
       {s.k_cmp, s.v_cmp, s.block_index, s.gate, s.o[0], s.o[1], s.o[2], s.lse[0], s.lse[1], s.lse[2]})
    if (!t.empty()) bytes += t.bytes();
  return bytes;
}

AttentionTensors allocate_attention(Arena& arena, const AttentionProblem& p, DType dtype) {
  const ModelConfig& c = p.config;
  const DType acc = acc_dtype(dtype);
  const int64_t B = p.B, T = p.T, Hq = c.n_heads, Hkv = c.n_kv_groups;
  const auto alloc = [&](const char* name, DType type, const Shape& shape) {
    return arena.alloc(MemTag::activations, name, type, shape);
  };
  AttentionTensors t;
  t.qkv = alloc("qkv", dtype, {B * T, qkv_width(c)});
  t.dqkv = alloc("dqkv", dtype, {B * T, qkv_width(c)});
  t.dout = alloc("dout", dtype, {B, T, Hq, c.d_v});
  t.dq = alloc("dq", acc, {B, T, Hq, c.d_k});
  t.delta = alloc("delta", acc, {3, B, T, Hq});
  t.rounding_unit = alloc("rounding_unit", acc, {B, T, Hq});
  for (int b = c.dense() ? kWin : 0; b < 3; ++b) {
    t.saved.o[b] = alloc("o", dtype, {B, T, Hq, c.d_v});
    t.saved.lse[b] = alloc("lse", acc, {B, T, Hq});
  }
  t.out = c.dense() ? t.saved.o[kWin] : alloc("out", dtype, {B, T, Hq, c.d_v});
  if (c.dense()) return t;
  const int64_t Tc = compressed_length(T, c.nsa.l, c.nsa.d);
  t.saved.k_cmp = alloc("k_cmp", dtype, {B, Tc, Hkv, c.d_k});
  t.saved.v_cmp = alloc("v_cmp", dtype, {B, Tc, Hkv, c.d_v});
  t.saved.block_index = alloc("block_index", DType::i32, {B, T, Hkv, c.nsa.n_sel});
  t.saved.gate = alloc("gate", acc, {3, B, T, Hkv});
  t.dk_cmp = alloc("dk_cmp", acc, t.saved.k_cmp.shape());
  t.dv_cmp = alloc("dv_cmp", acc, t.saved.v_cmp.shape());
  t.dq_group = alloc("dq of groups", acc, {B, T, Hkv, c.d_k});
  t.dgate = alloc("dgate", acc, t.saved.gate.shape());
  const auto weight = [&](ConstTensor& w, Tensor& dw, const Shape& shape) {
    t.drawn_weights.push_back(alloc("weight", dtype, shape));
    w = t.drawn_weights.back();
    dw = alloc("weight gradient", acc, shape);
  };
  const int64_t l = c.nsa.l;
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
  return t;
}

AttentionParts::AttentionParts(Device device, const AttentionProblem& p, const AttentionTensors& t, DType dtype)
    : p_(p), c_(p.config), t_(t), element_(static_cast<double>(size_of(dtype))) {
  const QkvViews views = split_qkv(t.qkv, c_, p.B, p.T), dviews = split_qkv(t.dqkv, c_, p.B, p.T);
  in_.q = views.q;
  grad_.dq = t.dq, grad_.dq_group = t.dq_group;
  for (int b = 0; b < 3; ++b) in_.k[b] = views.k[b], in_.v[b] = views.v[b];
  grad_.k = dviews.k, grad_.v = dviews.v;
  Runtime dry({.device = device, .planning = true});
  Scratch::Scope scope(dry.scratch());
  has_rounding_unit_ = !make_rounding_unit(dry.ctx(), scope).empty();
  if (c_.dense()) {
    add_dense();
  } else {
    add_nsa_forward();
    add_nsa_backward();
  }
}

Tensor AttentionParts::make_rounding_unit(Context& ctx, Scratch::Scope& scope) const {
  std::vector<RoundingUnitBranch> branches;
  const NsaSaved& s = t_.saved;
  if (c_.dense()) {
    branches = {{in_.k[kWin], in_.v[kWin], {}, t_.delta[kWin]}};
  } else {
    branches = {{s.k_cmp, s.v_cmp, s.gate[kCmp], t_.delta[kCmp]},
                {in_.k[kSel], in_.v[kSel], s.gate[kSel], t_.delta[kSel]},
                {in_.k[kWin], in_.v[kWin], s.gate[kWin], t_.delta[kWin]}};
  }
  return attend_rounding_unit(ctx, scope, t_.dq, t_.dout, in_.q, branches);
}

void AttentionParts::add_nsa_forward() {
  const NsaConfig& n = c_.nsa;
  const PhiOptions phi{n.phi, n.l, n.d};
  const AttendedPairs pairs = attended_pairs(c_, p_.T);
  const NsaSaved& s = t_.saved;
  const auto upstream = [this](int b) {
    return AttendGradIn{t_.dout, t_.saved.gate[b], t_.delta[b], t_.saved.lse[b], rounding_unit()};
  };
  const double widths = dk() + dv();

  add("compress", true, 0, element_ * (keys(widths) + compressed(widths)), [=, this](Context& ctx) {
    nsa_compress_forward(ctx, t_.saved.k_cmp, in_.k[kCmp], t_.weights.phi_k, phi);
    nsa_compress_forward(ctx, t_.saved.v_cmp, in_.v[kCmp], t_.weights.phi_v, phi);
  });
  add_branch(
      "compressed", pairs.cmp, compressed(widths),
      [=, this](Context& ctx) {
        nsa_attend_compressed_forward(ctx, {s.o[kCmp], s.lse[kCmp]}, {in_.q, s.k_cmp, s.v_cmp}, {n.l, n.d});
      },
      [=, this](Context& ctx) {
        nsa_attend_compressed_backward(ctx, {t_.dq, t_.dk_cmp, t_.dv_cmp}, upstream(kCmp), {in_.q, s.k_cmp, s.v_cmp},
                                       {n.l, n.d});
      });
  add("select", true, products(pairs.cmp, dk()),
      element_ * (rows(dk()) + compressed(dk())) + rows(4) + keys(4.0 * static_cast<double>(n.n_sel)),
      [=, this](Context& ctx) {
        nsa_select(ctx, s.block_index, in_.q, s.k_cmp, s.lse[kCmp],
                   {n.l, n.d, n.l_sel, n.n_sel, n.init_blocks, n.local_blocks});
      });
  add_branch(
      "selected", pairs.sel, keys(widths),
      [=, this](Context& ctx) {
        nsa_attend_selected_forward(ctx, {s.o[kSel], s.lse[kSel]}, {in_.q, in_.k[kSel], in_.v[kSel]}, s.block_index,
                                    n.l_sel);
      },
      [=, this](Context& ctx) {
        nsa_attend_selected_backward(ctx, {t_.dq, grad_.k[kSel], grad_.v[kSel]}, upstream(kSel),
                                     {in_.q, in_.k[kSel], in_.v[kSel]}, s.block_index, n.l_sel);
      });
  add_branch(
      "window", pairs.win, keys(widths),
      [=, this](Context& ctx) {
        nsa_attend_window_forward(ctx, {s.o[kWin], s.lse[kWin]}, {in_.q, in_.k[kWin], in_.v[kWin]}, n.w);
      },
      [=, this](Context& ctx) {
        nsa_attend_window_backward(ctx, {t_.dq, grad_.k[kWin], grad_.v[kWin]}, upstream(kWin),
                                   {in_.q, in_.k[kWin], in_.v[kWin]}, n.w);
      });
  add("gate", true, 0, element_ * rows(dk()) + keys(12),
      [=, this](Context& ctx) { nsa_gate_forward(ctx, s.gate, in_.q, t_.weights.gate, n.gate); });
  add("combine", true, 0, element_ * rows(4 * dv()) + keys(12),
      [=, this](Context& ctx) { nsa_combine_forward(ctx, t_.out, branch_outputs(), s.gate); });
  add("nsa", true, products(pairs.cmp + pairs.sel + pairs.win, widths) + products(pairs.cmp, dk()),
      element_ * (rows(dk() + 4 * dv()) + 3 * keys(widths)) + rows(12),
      [=, this](Context& ctx) { nsa_forward(ctx, t_.out, s, in_, t_.weights, n); });
}

void AttentionParts::add_nsa_backward() {
  const NsaConfig& n = c_.nsa;
  const PhiOptions phi{n.phi, n.l, n.d};
  const AttendedPairs pairs = attended_pairs(c_, p_.T);
  const NsaSaved& s = t_.saved;
  const double widths = dk() + dv();

  add("combine", false, 0, element_ * rows(4 * dv()) + keys(24) + rows(12),
      [=, this](Context& ctx) { nsa_combine_backward(ctx, t_.dgate, t_.delta, t_.dout, branch_outputs(), s.gate); });
  if (has_rounding_unit_)  // the small copy keeps the result for later parts; the whole needs no copy
    add("rounding_unit", false, 0, element_ * (rows(dk() + dv()) + 3 * keys(widths)) + rows(12),
        [=, this](Context& ctx) {
          Scratch::Scope scope(ctx.scratch);
          copy(ctx, t_.rounding_unit, make_rounding_unit(ctx, scope));
        });
  parts_.insert(parts_.end(), backward_.begin(), backward_.end());
  add("compress", false, 0, element_ * keys(widths) + 4 * compressed(widths), [=, this](Context& ctx) {
    nsa_compress_backward(ctx, grad_.k[kCmp], t_.weight_grads.phi_k, t_.dk_cmp, in_.k[kCmp], t_.weights.phi_k, phi);
    nsa_compress_backward(ctx, grad_.v[kCmp], t_.weight_grads.phi_v, t_.dv_cmp, in_.v[kCmp], t_.weights.phi_v, phi);
  });
  add("gate", false, 0, element_ * rows(dk()) + keys(24 + 4 * dk()), [=, this](Context& ctx) {
    nsa_gate_backward(ctx, t_.dq_group, t_.weight_grads.gate, t_.dgate, s.gate, in_.q, t_.weights.gate, n.gate);
  });
  add("nsa", false, products(pairs.cmp + pairs.sel + pairs.win, 3 * dk() + 2 * dv()),
      element_ * (rows(dk() + 4 * dv()) + 6 * keys(widths)) + rows(12 + 4 * dk()),
      [=, this](Context& ctx) { nsa_backward(ctx, grad_, t_.weight_grads, t_.dout, in_, s, t_.weights, n); });
}

void AttentionParts::add_dense() {
  const AttendIn in{in_.q, in_.k[kWin], in_.v[kWin]};
  const NsaSaved& s = t_.saved;
  const Tensor delta = t_.delta[kWin];
  add_branch(
      "dense", attended_pairs(c_, p_.T).win, keys(dk() + dv()),
      [=, this](Context& ctx) {
        nsa_attend_window_forward(ctx, {s.o[kWin], s.lse[kWin]}, in, p_.T);
      },
      [=, this](Context& ctx) {
        Scratch::Scope scope(ctx.scratch);
        attention_delta(ctx, delta, t_.dout, s.o[kWin]);
        zero(ctx, t_.dq);
        nsa_attend_window_backward(ctx, {t_.dq, grad_.k[kWin], grad_.v[kWin]},
                                   {t_.dout, {}, delta, s.lse[kWin], make_rounding_unit(ctx, scope)}, in, p_.T);
      });
  parts_.insert(parts_.end(), backward_.begin(), backward_.end());
}

}  // namespace triad
