#include "model/layer.h"

#include "kernels/activation.h"
#include "kernels/matmul.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"

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

// Calls rotate(view) for q and every branch's k.
template <class F>
void for_each_rotated_key(const QkvViews& views, F&& rotate) {
  for (const Tensor& k : views.k)
    if (!k.empty()) rotate(k);
}

// The gated sum of the branches, as out_proj reads it: [N, Hq*dv]. Rebuilt in backward rather than kept.
Tensor attention_output(Context& ctx, const LayerContext& lc, const LayerActivations& a, Scratch::Scope& scope) {
  const ModelConfig& c = lc.config;
  if (c.dense()) return a.nsa.o[kWin].view({lc.B * lc.T, c.n_heads * c.d_v});
  Tensor out = scope.alloc(a.x.dtype, {lc.B, lc.T, c.n_heads, c.d_v});
  nsa_combine_forward(ctx, out, {a.nsa.o[0], a.nsa.o[1], a.nsa.o[2]}, a.nsa.gate);
  return out.view({lc.B * lc.T, c.n_heads * c.d_v});
}

void attention_forward(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a) {
  const ModelConfig& c = lc.config;
  Scratch::Scope scope(ctx.scratch);
  Tensor h = scope.alloc(a.x.dtype, a.x.shape());
  rmsnorm_forward(ctx, h, a.rrms1, a.x, w.norm1, c.norm_eps);
  linear_forward(ctx, a.qkv, h, w.qkv);
  const QkvViews views = split_qkv(a.qkv, c, lc.B, lc.T);
  rope_forward(ctx, views.q, views.q, lc.rope_cos, lc.rope_sin);
  for_each_rotated_key(views, [&](Tensor k) { rope_forward(ctx, k, k, lc.rope_cos, lc.rope_sin); });

  Tensor out;
  if (c.dense()) {
    nsa_attend_window_forward(ctx, {a.nsa.o[kWin], a.nsa.lse[kWin]}, {views.q, views.k[kWin], views.v[kWin]}, lc.T);
    out = attention_output(ctx, lc, a, scope);
  } else {
    out = scope.alloc(a.x.dtype, {lc.B, lc.T, c.n_heads, c.d_v});
    nsa_forward(ctx, out, a.nsa, nsa_in(views), w.nsa, c.nsa, lc.keep_block_index);
    out = out.view({lc.B * lc.T, c.n_heads * c.d_v});
  }
  linear_forward(ctx, a.x_mid, out, w.out_proj, a.x);
}

// dx: gradient of x_mid in, of x out.
void attention_backward(Context& ctx, const LayerContext& lc, const Weights& w, const Grads& g, LayerActivations& a,
                        Tensor dx) {
  const ModelConfig& c = lc.config;
  const DType dtype = a.x.dtype;
  Scratch::Scope scope(ctx.scratch);
  Tensor dqkv = scope.alloc(dtype, a.qkv.shape());
  {
    Scratch::Scope inner(ctx.scratch);
    Tensor dout = inner.alloc(dtype, {lc.B, lc.T, c.n_heads, c.d_v});
    const Tensor out = attention_output(ctx, lc, a, inner);
    linear_backward(ctx, dout.view(out.shape()), g.out_proj, dx, out, w.out_proj);

    const QkvViews views = split_qkv(a.qkv, c, lc.B, lc.T), dviews = split_qkv(dqkv, c, lc.B, lc.T);
    Tensor dq = inner.alloc(acc_dtype(dtype), {lc.B, lc.T, c.n_heads, c.d_k});
    if (c.dense()) {
      const AttendIn in{views.q, views.k[kWin], views.v[kWin]};
      Tensor delta = inner.alloc(acc_dtype(dtype), a.nsa.lse[kWin].shape());
      attention_delta(ctx, delta, dout, a.nsa.o[kWin]);
      zero(ctx, dq);
      const Tensor quantum = attend_quantum(ctx, inner, dq, dout, in.q, {{in.k, in.v, {}, delta}});
      nsa_attend_window_backward(ctx, {dq, dviews.k[kWin], dviews.v[kWin]},
                                 {dout, {}, delta, a.nsa.lse[kWin], quantum}, in, lc.T);
    } else {
      nsa_backward(ctx, {dq, dviews.k, dviews.v}, g.nsa, dout, nsa_in(views), a.nsa, w.nsa, c.nsa);
    }
    rope_backward(ctx, dviews.q, dq, lc.rope_cos, lc.rope_sin);
    for_each_rotated_key(dviews, [&](Tensor dk) { rope_backward(ctx, dk, dk, lc.rope_cos, lc.rope_sin); });
  }
  Tensor h = scope.alloc(dtype, a.x.shape()), dh = scope.alloc(dtype, a.x.shape());
  rmsnorm_forward(ctx, h, a.rrms1, a.x, w.norm1, c.norm_eps);
  linear_backward(ctx, dh, g.qkv, dqkv, h, w.qkv);
  rmsnorm_backward(ctx, dx, g.norm1, dh, a.x, w.norm1, a.rrms1, dx);
}

Tensor mlp_activation(Context& ctx, const ModelConfig& c, const LayerActivations& a, Scratch::Scope& scope) {
  Tensor act = scope.alloc(a.x.dtype, {a.x.size(0), c.mlp_hidden});
  if (c.mlp == MlpKind::silu) {
    silu_forward(ctx, act, a.mlp_pre);
  } else {
    swiglu_forward(ctx, act, a.mlp_pre.slice(1, 0, c.mlp_hidden), a.mlp_pre.slice(1, c.mlp_hidden, 2 * c.mlp_hidden));
  }
  return act;
}

void mlp_forward(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a, Tensor x_out) {
  Scratch::Scope scope(ctx.scratch);
  Tensor h = scope.alloc(a.x.dtype, a.x.shape());
  rmsnorm_forward(ctx, h, a.rrms2, a.x_mid, w.norm2, lc.config.norm_eps);
  linear_forward(ctx, a.mlp_pre, h, w.mlp_in);
  linear_forward(ctx, x_out, mlp_activation(ctx, lc.config, a, scope), w.mlp_out, a.x_mid);
}

// dx: gradient of x_out in, of x_mid out.
void mlp_backward(Context& ctx, const LayerContext& lc, const Weights& w, const Grads& g, LayerActivations& a,
                  Tensor dx) {
  const ModelConfig& c = lc.config;
  const int64_t H = c.mlp_hidden;
  const DType dtype = a.x.dtype;
  Scratch::Scope scope(ctx.scratch);
  Tensor dpre = scope.alloc(dtype, a.mlp_pre.shape());
  {
    Scratch::Scope inner(ctx.scratch);
    const bool silu = c.mlp == MlpKind::silu;
    Tensor dact = silu ? dpre : inner.alloc(dtype, {a.x.size(0), H});
    linear_backward(ctx, dact, g.mlp_out, dx, mlp_activation(ctx, c, a, inner), w.mlp_out);
    if (silu) {
      silu_backward(ctx, dpre, dact, a.mlp_pre);
    } else {
      swiglu_backward(ctx, dpre.slice(1, 0, H), dpre.slice(1, H, 2 * H), dact, a.mlp_pre.slice(1, 0, H),
                      a.mlp_pre.slice(1, H, 2 * H));
    }
  }
  Tensor h = scope.alloc(dtype, a.x.shape()), dh = scope.alloc(dtype, a.x.shape());
  rmsnorm_forward(ctx, h, a.rrms2, a.x_mid, w.norm2, c.norm_eps);
  linear_backward(ctx, dh, g.mlp_in, dpre, h, w.mlp_in);
  rmsnorm_backward(ctx, dx, g.norm2, dh, a.x_mid, w.norm2, a.rrms2, dx);
}

}  // namespace

void layer_forward(Context& ctx, const LayerContext& lc, const Weights& weights, LayerActivations& a, Tensor x_out) {
  attention_forward(ctx, lc, weights, a);
  mlp_forward(ctx, lc, weights, a, x_out);
}

void layer_backward(Context& ctx, const LayerContext& lc, const Weights& weights, const Grads& grads,
                    LayerActivations& a, Tensor dx) {
  mlp_backward(ctx, lc, weights, grads, a, dx);
  attention_backward(ctx, lc, weights, grads, a, dx);
}

}  // namespace triad
