#include "model/layer.h"

#include "kernels/ops/activation.h"
#include "kernels/ops/linear_silu.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/rmsnorm.h"
#include "kernels/ops/rope.h"

namespace triad {

namespace {

constexpr int kWin = static_cast<int>(Branch::win);
using Weights = LayerTensors<ConstTensor>;
using Grads = LayerTensors<Tensor>;

NsaIn nsa_in(const QkvViews& views) {
  NsaIn in{views.q, {}, {}};
  for (int b = 0; b < 3; ++b) in.k[b] = views.k[b], in.v[b] = views.v[b];
  return in;
}

// Reports finished gradients to the sink.
void report(Context& ctx, const LayerContext& lc, std::initializer_list<Tensor> grads) {
  if (lc.sink == nullptr) return;
  for (const Tensor& grad : grads)
    if (!grad.empty()) lc.sink->ready(grad, ctx.stream);
}

// Checks tensors after the ops of a stage, in the order in which the ops wrote them.
void expect_finite(Context& ctx, const LayerContext& lc, std::initializer_list<Asserts::Written> written) {
  if (lc.asserts != nullptr) lc.asserts->finite(ctx, lc.layer, written);
}

// The same for what nsa_forward wrote.
void expect_sound(Context& ctx, const LayerContext& lc, const NsaSaved& s, ConstTensor out) {
  if (lc.asserts == nullptr) return;
  expect_finite(ctx, lc,
                {{"nsa_compress", "k_cmp", s.k_cmp},
                 {"nsa_compress", "v_cmp", s.v_cmp},
                 {"nsa_attend_compressed", "o_cmp", s.o[0]}});
  lc.asserts->lists(ctx, lc.layer, "nsa_select", "block_index", s.block_index, lc.config.nsa.l_sel);
  expect_finite(ctx, lc,
                {{"nsa_attend_selected", "o_sel", s.o[1]},
                 {"nsa_attend_window", "o_win", s.o[2]},
                 {"nsa_gate", "gate", s.gate},
                 {"nsa_combine", "out", out}});
}

// Attention up to the input of out_proj: a.x -> out [B,T,Hq,dv], allocated in scope.
Tensor attend(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a, Scratch::Scope& scope) {
  const ModelConfig& c = lc.config;
  Tensor h = scope.alloc(a.x.dtype, a.x.shape(), "norm1(x)");
  rmsnorm_forward(ctx, h, a.rrms1, a.x, w.norm1, c.norm_eps);
  linear_forward(ctx, a.qkv, h, w.qkv);
  const QkvViews views = split_qkv(a.qkv, c, lc.B, lc.T);
  rope_forward(ctx, views.q, views.q, lc.rope_cos, lc.rope_sin, views.k);
  expect_finite(ctx, lc, {{"rmsnorm, q, k and v projections, rope", "qkv", a.qkv}});

  Tensor out = a.nsa.o[kWin];
  if (c.dense()) {
    nsa_attend_window_forward(ctx, {out, a.nsa.lse[kWin]}, {views.q, views.k[kWin], views.v[kWin]}, lc.T);
    expect_finite(ctx, lc, {{"nsa_attend_window", "o_win", out}});
  } else {
    out = scope.alloc(a.x.dtype, out.shape(), "attention");
    nsa_forward(ctx, out, a.nsa, nsa_in(views), w.nsa, c.nsa, lc.keep_block_index);
    if (lc.stats != nullptr) lc.stats->add(ctx, lc.layer, a.nsa.gate, a.nsa.block_index);
    expect_sound(ctx, lc, a.nsa, out);
  }
  return out;
}

// a.x + out_proj . out -> a.x_mid
void project_out(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a, const Tensor& out) {
  linear_forward(ctx, a.x_mid, out.view({lc.B * lc.T, lc.config.n_heads * lc.config.d_v}), w.out_proj, a.x);
  expect_finite(ctx, lc, {{"out_proj", "x_mid", a.x_mid}});
}

void attention_forward(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor out = attend(ctx, lc, w, a, scope);
  project_out(ctx, lc, w, a, out);
}

// Backward of x + linear(norm(x)) down to dx; dy is the gradient of the linear's output. The weight gradient needs the
// normed rows: rmsnorm_backward writes them over their own gradient h, because it reads x anyway.
void norm_linear_backward(Context& ctx, Tensor dx, Tensor dnorm, Tensor dw, ConstTensor dy, ConstTensor x,
                          ConstTensor norm, ConstTensor rrms, ConstTensor w, bool add) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor h = scope.alloc(dx.dtype, dx.shape(), "dnorm");
  linear_backward_input(ctx, h, dy, w);
  rmsnorm_backward(ctx, dx, dnorm, h, x, norm, rrms, dx, h);
  linear_backward_weight(ctx, dw, dy, h, add);
}

// Backward of the branches and gates: dout -> dq, dq_group, the gradients of k and v in dviews, and out, the input of
// out_proj, again. dense: dq_group stays empty, and out is what forward kept. Allocates in scope.
struct BranchGrads {
  Tensor dq, dq_group;  // [B,T,Hq,dk], [B,T,Hkv,dk] acc
  Tensor out;           // [B,T,Hq,dv] T
};
BranchGrads branches_backward(Context& ctx, const LayerContext& lc, const Weights& w, const Grads& g,
                              const LayerActivations& a, const QkvViews& views, const QkvViews& dviews,
                              const Tensor& dout, Scratch::Scope& scope) {
  const ModelConfig& c = lc.config;
  const DType acc = acc_dtype(a.x.dtype);
  BranchGrads grads{.dq = scope.alloc(acc, views.q.shape(), "dq"), .dq_group = {}, .out = a.nsa.o[kWin]};
  if (c.dense()) {
    const Tensor& lse = a.nsa.lse[kWin];
    const Tensor delta = scope.alloc(acc, lse.shape()), norm = scope.alloc(acc, delta.shape());
    attention_delta(ctx, delta, dout, grads.out, norm);
    zero(ctx, grads.dq);
    const AttendIn in{views.q, views.k[kWin], views.v[kWin]};
    const Tensor rounding_unit =
        attend_rounding_unit(ctx, scope, grads.dq, dout, in.q, {{in.k, in.v, {}, delta}}, norm);
    nsa_attend_window_backward(ctx, {grads.dq, dviews.k[kWin], dviews.v[kWin]}, {dout, {}, delta, lse, rounding_unit},
                               in, lc.T);
  } else {
    grads.out = scope.alloc(a.x.dtype, grads.out.shape(), "attention");
    grads.dq_group = scope.alloc(acc, views.k[kWin].shape(), "dq_group");
    nsa_backward(ctx, {grads.dq, grads.dq_group, dviews.k, dviews.v, grads.out}, g.nsa, dout, nsa_in(views), a.nsa,
                 w.nsa, c.nsa);
  }
  return grads;
}

// dx: gradient of x_mid on entry, of x on return.
void attention_backward(Context& ctx, const LayerContext& lc, const Weights& w, const Grads& g, LayerActivations& a,
                        Tensor dx) {
  const ModelConfig& c = lc.config;
  const DType dtype = a.x.dtype;
  Scratch::Scope scope(ctx.scratch);
  Tensor dqkv = scope.alloc(dtype, a.qkv.shape(), "dqkv");
  {
    Scratch::Scope inner(ctx.scratch);
    const QkvViews views = split_qkv(a.qkv, c, lc.B, lc.T), dviews = split_qkv(dqkv, c, lc.B, lc.T);
    const Tensor dout = inner.alloc(dtype, a.nsa.o[kWin].shape(), "dattention");
    const Shape rows = {lc.B * lc.T, c.n_heads * c.d_v};
    linear_backward_input(ctx, dout.view(rows), dx, w.out_proj);
    const BranchGrads branches = branches_backward(ctx, lc, w, g, a, views, dviews, dout, inner);
    linear_backward_weight(ctx, g.out_proj, dx, branches.out.view(rows), lc.add_products);
    report(ctx, lc, {g.out_proj});
    for_each_tensor_of_nsa(g.nsa, [&](ParamRole, const Tensor& grad) { report(ctx, lc, {grad}); });
    rope_backward(ctx, dviews.q, branches.dq, lc.rope_cos, lc.rope_sin, dviews.k, branches.dq_group);
    expect_finite(ctx, lc,
                  {{"out_proj backward", "dout", dout},
                   {"nsa_gate backward", "dq_group", branches.dq_group},
                   {c.dense() ? "nsa_attend_window backward" : "backward of the branches", "dq", branches.dq},
                   {"backward of the branches and rope", "dqkv", dqkv}});
  }
  norm_linear_backward(ctx, dx, g.norm1, g.qkv, dqkv, a.x, w.norm1, a.rrms1, w.qkv, lc.add_products);
  expect_finite(ctx, lc, {{"backward of the projections and rmsnorm", "dx", dx}});
  report(ctx, lc, {g.norm1, g.qkv});
}

// a.x_mid -> a.mlp_pre and act, the activation's output.
void mlp_in(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a, Tensor act) {
  const int64_t H = lc.config.mlp_hidden;
  Scratch::Scope scope(ctx.scratch);
  const Tensor h = scope.alloc(a.x.dtype, a.x.shape(), "norm2(x_mid)");
  rmsnorm_forward(ctx, h, a.rrms2, a.x_mid, w.norm2, lc.config.norm_eps);
  if (lc.config.mlp == MlpKind::silu) {
    linear_silu_forward(ctx, act, a.mlp_pre, h, w.mlp_in);
  } else {
    linear_forward(ctx, a.mlp_pre, h, w.mlp_in);
    swiglu_forward(ctx, act, a.mlp_pre.slice(1, 0, H), a.mlp_pre.slice(1, H, 2 * H));
  }
  expect_finite(ctx, lc, {{"rmsnorm, first mlp matrix", "mlp_pre", a.mlp_pre}});
}

Tensor alloc_act(const LayerContext& lc, const LayerActivations& a, Scratch::Scope& scope) {
  return scope.alloc(a.x.dtype, {a.x.size(0), lc.config.mlp_hidden}, "activation");
}

void mlp_forward(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a, Tensor x_out) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor act = alloc_act(lc, a, scope);
  mlp_in(ctx, lc, w, a, act);
  linear_forward(ctx, x_out, act, w.mlp_out, a.x_mid);
  expect_finite(ctx, lc, {{"activation, last mlp matrix", "x_out", x_out}});
}

// dx: gradient of x_out on entry, of x_mid on return.
void mlp_backward(Context& ctx, const LayerContext& lc, const Weights& w, const Grads& g, LayerActivations& a,
                  Tensor dx) {
  const ModelConfig& c = lc.config;
  const int64_t H = c.mlp_hidden;
  const DType dtype = a.x.dtype;
  Scratch::Scope scope(ctx.scratch);
  Tensor dpre = scope.alloc(dtype, a.mlp_pre.shape(), "dmlp_pre");
  {
    Scratch::Scope inner(ctx.scratch);
    const Tensor act = alloc_act(lc, a, inner);
    if (c.mlp == MlpKind::silu) {
      linear_silu_backward(ctx, dpre, act, dx, w.mlp_out, a.mlp_pre);
    } else {
      linear_backward_input(ctx, act, dx, w.mlp_out);
      swiglu_backward(ctx, dpre.slice(1, 0, H), dpre.slice(1, H, 2 * H), act, a.mlp_pre.slice(1, 0, H),
                      a.mlp_pre.slice(1, H, 2 * H), act);
    }
    linear_backward_weight(ctx, g.mlp_out, dx, act, lc.add_products);
    report(ctx, lc, {g.mlp_out});
  }
  norm_linear_backward(ctx, dx, g.norm2, g.mlp_in, dpre, a.x_mid, w.norm2, a.rrms2, w.mlp_in, lc.add_products);
  expect_finite(ctx, lc,
                {{"backward of the last mlp matrix and activation", "dpre", dpre},
                 {"backward of the first mlp matrix and rmsnorm", "dx", dx}});
  report(ctx, lc, {g.norm2, g.mlp_in});
}

}  // namespace

void layer_forward(Context& ctx, const LayerContext& lc, const Weights& weights, LayerActivations& a, Tensor x_out) {
  attention_forward(ctx, lc, weights, a);
  mlp_forward(ctx, lc, weights, a, x_out);
}

void layer_replay(Context& ctx, const LayerContext& lc, const Weights& weights, LayerActivations& a,
                  Recompute recompute) {
  LayerContext with_lists = lc;
  with_lists.keep_block_index = true;
  Scratch::Scope scope(ctx.scratch);
  if (covers(recompute, LayerPart::attention)) {
    Scratch::Scope inner(ctx.scratch);
    const Tensor out = attend(ctx, with_lists, weights, a, inner);
    if (covers(recompute, LayerPart::out_proj)) project_out(ctx, lc, weights, a, out);
  }
  // The activation is computed too, although backward computes it again: only the fused kernel of forward gives the
  // same bits of mlp_pre.
  if (covers(recompute, LayerPart::mlp_in)) mlp_in(ctx, lc, weights, a, alloc_act(lc, a, scope));
}

void layer_backward(Context& ctx, const LayerContext& lc, const Weights& weights, const Grads& grads,
                    LayerActivations& a, Tensor dx) {
  mlp_backward(ctx, lc, weights, grads, a, dx);
  attention_backward(ctx, lc, weights, grads, a, dx);
}

}  // namespace triad
