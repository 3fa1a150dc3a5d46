#include "model/layer.h"

#include <utility>

#include "kernels/nsa/document_tables.h"
#include "kernels/ops/activation.h"
#include "kernels/ops/column_sum.h"
#include "kernels/ops/linear_fp8.h"
#include "kernels/ops/linear_silu.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/rmsnorm.h"
#include "kernels/ops/rope.h"
#include "model/fp8.h"
#include "model/lora.h"
#include "model/unused_memory.h"

namespace triad {

namespace {

using Weights = LayerTensors<ConstTensor>;
using Grads = LayerTensors<Tensor>;

// Reports finished gradients to the GradSink, if there is one.
void report(Context& ctx, const LayerContext& lc, std::initializer_list<Tensor> grads) {
  if (lc.sink == nullptr) return;
  for (const Tensor& grad : grads)
    if (!grad.empty()) lc.sink->ready(grad, ctx.stream);
}

// A linear layer's weight, whether its layer multiplies in fp8, and where its casts are counted, absent where they are
// not.
struct Linear {
  ConstTensor w;
  bool fp8;
  Tensor x_counts = {}, dy_counts = {}, row_counts = {}, column_counts = {};
};
// x_role: the Fp8Role of the input, which the gradient's follows.
Linear linear_of(const LayerContext& lc, const ConstTensor& w, int64_t x_role) {
  const Tensor& counts = lc.fp8_counts;
  if (!lc.fp8 || counts.empty()) return {w, lc.fp8};
  return {w, lc.fp8, counts[x_role], counts[x_role + 1], counts[Fp8Role::weight_rows], counts[Fp8Role::weight_columns]};
}
Linear qkv_of(const LayerContext& lc, const Weights& w) { return linear_of(lc, w.qkv, Fp8Role::qkv_x); }
Linear out_proj_of(const LayerContext& lc, const Weights& w) { return linear_of(lc, w.out_proj, Fp8Role::out_proj_x); }
Linear mlp_in_of(const LayerContext& lc, const Weights& w) { return linear_of(lc, w.mlp_in, Fp8Role::mlp_in_x); }
Linear mlp_out_of(const LayerContext& lc, const Weights& w) { return linear_of(lc, w.mlp_out, Fp8Role::mlp_out_x); }

bool takes_fp8(const Linear& linear) { return linear.fp8 && fits_fp8(linear.w); }
// Records a product that should be in fp8, but does not fit.
void record_if_not_fp8(Context& ctx, const Linear& linear, const ConstTensor& y) {
  if (linear.fp8 && !takes_fp8(linear)) record_not_fp8(ctx, y, linear.w);
}
void count(Context& ctx, const Tensor& counts, const E4m3Rows& rows) {
  if (!counts.empty()) count_e4m3(ctx, counts, rows);
}
template <class Memory>
E4m3Rows cast(Context& ctx, Memory& memory, ConstTensor x, const Tensor& counts = {}) {
  const E4m3Rows rows = alloc_e4m3_rows(memory, x.size(0), x.size(1));
  cast_rows_e4m3(ctx, rows, x);
  count(ctx, counts, rows);
  return rows;
}

void multiply(Context& ctx, Tensor y, ConstTensor x, const Linear& linear, ConstTensor addend = {}) {
  record_if_not_fp8(ctx, linear, y);
  if (!takes_fp8(linear)) return linear_forward(ctx, y, x, linear.w, addend);
  Scratch::Scope scope(ctx.scratch);
  linear_forward_fp8(ctx, y, cast(ctx, scope, x, linear.x_counts), linear.w, addend, linear.row_counts);
}
// y = linear(norm(x)) in fp8, where the norm writes e4m3.
void multiply_normed(Context& ctx, Tensor y, Tensor rrms, ConstTensor x, ConstTensor norm, double eps,
                     const Linear& linear, ConstTensor addend = {}) {
  Scratch::Scope scope(ctx.scratch);
  const E4m3Rows h = alloc_e4m3_rows(scope, x.size(0), x.size(1));
  rmsnorm_forward_e4m3(ctx, h, rrms, x, norm, eps);
  count(ctx, linear.x_counts, h);
  linear_forward_fp8(ctx, y, h, linear.w, addend, linear.row_counts);
}

// The gradient of a linear layer's result, and its cast if the layer's products are in fp8, else no rows. Both
// gradients that need it read the same cast.
struct ResultGrad {
  ConstTensor dy;
  E4m3Rows rows;
};
template <class Memory>
ResultGrad result_grad(Context& ctx, Memory& memory, ConstTensor dy, const Linear& linear) {
  return {dy, takes_fp8(linear) ? cast(ctx, memory, dy, linear.dy_counts) : E4m3Rows{}};
}
void multiply_back(Context& ctx, Tensor dx, const ResultGrad& grad, const Linear& linear) {
  if (!grad.rows.empty()) return linear_backward_input_fp8(ctx, dx, grad.rows, linear.w, linear.column_counts);
  record_if_not_fp8(ctx, linear, dx);
  linear_backward_input(ctx, dx, grad.dy, linear.w);
}
// Writes or adds the weight's gradient. x: the layer's input.
void multiply_weight(Context& ctx, const LayerContext& lc, Tensor dw, const ResultGrad& grad, ConstTensor x) {
  if (grad.rows.empty()) return linear_backward_weight(ctx, dw, grad.dy, x, lc.add_products);
  Scratch::Scope scope(ctx.scratch);
  linear_backward_weight_fp8(ctx, dw, grad.rows, cast(ctx, scope, x), lc.add_products);
}

// The adapters of a layer's linear layer; `pieces` is empty if it has none.
struct Adapters {
  const LoraTensors<ConstTensor>& w;
  std::span<const LoraPiece> pieces;
  double scale;
};
Adapters adapters_of(const LayerContext& lc, const Weights& w, LoraPlace place) {
  const auto i = static_cast<size_t>(place);
  if (lc.lora == nullptr) return {w.lora[i], {}, 0};
  return {w.lora[i], lc.lora->pieces[i], lc.lora->scale};
}
// y += their result for x.
void adapt(Context& ctx, Tensor y, ConstTensor x, const Adapters& its) {
  if (!its.pieces.empty()) lora_forward(ctx, y, x, its.w.a, its.w.b, its.pieces, its.scale);
}
// dx += their gradient for dy. Returns du, which adapt_weights() needs, in the scope; absent without adapters.
Tensor adapt_back(Context& ctx, Scratch::Scope& scope, Tensor dx, ConstTensor dy, const Adapters& its) {
  if (its.pieces.empty()) return {};
  const Tensor du = scope.alloc(dx.dtype, {dx.size(0), its.w.a.size(0)}, "dlora");
  lora_backward_input(ctx, dx, du, dy, its.w.a, its.w.b, its.pieces, its.scale);
  return du;
}
// Adds the gradients of the adapters' weights, and reports them.
void adapt_weights(Context& ctx, const LayerContext& lc, const LoraTensors<Tensor>& g, ConstTensor du, ConstTensor dy,
                   ConstTensor x, const Adapters& its) {
  if (its.pieces.empty()) return;
  lora_backward_weight(ctx, g.a, g.b, du, dy, x, its.w.a, its.pieces, its.scale);
  report(ctx, lc, {g.a, g.b});
}
const LoraTensors<Tensor>& adapter_grads(const Grads& g, LoraPlace place) { return g.lora[static_cast<size_t>(place)]; }

// Calls rotate(rows, cos, sin, begin), which rotates q and keys by their positions, for each chunk of this rank's
// tokens. rows(t): the chunk's rows of a tensor t. A token's position is its number in the chunk minus its entry in
// `begin`, or if `begin` is absent that number; cos and sin are the tables from position 0 on.
template <class Rotate>
void rotate_chunks(Context& ctx, const LayerContext& lc, const RopeTables& angles, Rotate&& rotate) {
  const SequenceLayout& layout = lc.layout;
  for (int64_t i = 0; i < layout.chunks(); ++i) {
    const RowRange chunk = layout.chunk(i);
    const auto rows = [&](const auto& t) { return layout.rows_of_chunk(t, i); };
    if (lc.documents.empty()) {
      const auto from_chunk = [&](const ConstTensor& table) { return table.slice(0, chunk.begin, table.size(0)); };
      rotate(rows, from_chunk(angles.cos), from_chunk(angles.sin), ConstTensor{});
    } else {
      Scratch::Scope scope(ctx.scratch);
      const Documents documents =
          layout.shared() ? cut_documents(ctx, scope, lc.documents, chunk.begin, chunk.end) : lc.documents;
      rotate(rows, angles.cos, angles.sin, documents.begin);
    }
  }
}
template <class Rows>
RopeKeys rows_of_keys(const std::array<Tensor, 3>& k, Rows&& rows) {
  return {rows(k[0]), rows(k[1]), rows(k[2])};
}

// The q, k and v (out of all) with which the layer attends in this pass.
QkvViews attended(const LayerContext& lc, const QkvViews& all) {
  return lc.dense ? dense_views(all, kv_pairs(lc.config, lc.kind())) : all;
}

// The same for the index's queries and keys.
void norm_and_rotate_index(Context& ctx, const LayerContext& lc, const Weights& w, const LayerActivations& a,
                           const QkvViews& views) {
  if (lc.config.qk_norm) {
    const QkvViews projected = with_index(views, a.index, lc.config);
    qk_norm_forward(ctx, {views.index_q, views.index_k}, {projected.index_q, projected.index_k}, w.index_norm,
                    lc.config.norm_eps);
  }
  rotate_chunks(ctx, lc, lc.index_rope, [&](auto&& rows, ConstTensor cos, ConstTensor sin, ConstTensor begin) {
    const Tensor q = rows(views.index_q);
    rope_forward(ctx, q, q, cos, sin, {rows(views.index_k)}, begin);
  });
  lc.expect_finite(ctx, {{"projections of the index, rope", "index", a.index_qk.empty() ? a.index : a.index_qk}});
}

// Norm (with model.qk_norm) and rotation of q and k: from a.qkv to a.qk, without the norm within a.qkv.
void norm_and_rotate(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a) {
  const ModelConfig& c = lc.config;
  const QkvViews all = attended_qkv(a, c, lc.kind(), lc.B, lc.T), views = attended(lc, all);
  if (c.qk_norm)
    qk_norm_forward(ctx, qk_heads(all), const_qk_heads(split_qkv(a.qkv, c, lc.kind(), lc.B, lc.T)), w.qk_norm,
                    c.norm_eps);
  rotate_chunks(ctx, lc, lc.rope, [&](auto&& rows, ConstTensor cos, ConstTensor sin, ConstTensor begin) {
    const Tensor q = rows(views.q);
    rope_forward(ctx, q, q, cos, sin, rows_of_keys(views.k, rows), begin);
  });
  if (!a.index.empty()) norm_and_rotate_index(ctx, lc, w, a, views);
  if (c.qk_norm)
    lc.expect_finite(ctx, {{"qk_norm, rope", "qk", a.qk}});
  else
    lc.expect_finite(ctx, {{"rmsnorm, q, k and v projections, rope", "qkv", a.qkv}});
}

// Attention up to out_proj's input: reads a.x and returns out [B,T,Hq,dv]. In an NSA layer it is allocated in `scope`;
// in a dense layer or pass it's a tensor in `a`.
Tensor attention_in(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a,
                    Scratch::Scope& scope) {
  const ModelConfig& c = lc.config;
  const ConstTensor bias = repeat_row(w.qkv_bias, a.qkv.size(0));
  if (const Linear qkv = qkv_of(lc, w); takes_fp8(qkv) && a.index.empty()) {
    multiply_normed(ctx, a.qkv, a.rrms1, a.x, w.norm1, c.norm_eps, qkv, bias);
  } else {
    const Tensor h = scope.alloc(a.x.dtype, a.x.shape(), "norm1(x)");
    rmsnorm_forward(ctx, h, a.rrms1, a.x, w.norm1, c.norm_eps);
    multiply(ctx, a.qkv, h, qkv, bias);
    adapt(ctx, a.qkv, h, adapters_of(lc, w, LoraPlace::qkv));
    if (!a.index.empty()) linear_forward(ctx, a.index, h, w.index);
  }
  if (c.qk_norm) lc.expect_finite(ctx, {{"rmsnorm, q, k and v projections", "qkv", a.qkv}});
  norm_and_rotate(ctx, lc, w, a);
  const QkvViews views = attended(lc, attended_qkv(a, c, lc.kind(), lc.B, lc.T));
  return attend_forward(ctx, lc, w.nsa, views, a.attention, scope);
}

// Ends attention: a.x_mid = a.x + out_proj . out.
void project_out(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a, const Tensor& out) {
  const Tensor rows = out.view({lc.B * lc.T, lc.config.n_heads * lc.config.d_v});
  multiply(ctx, a.x_mid, rows, out_proj_of(lc, w), a.x);
  adapt(ctx, a.x_mid, rows, adapters_of(lc, w, LoraPlace::out_proj));
  lc.expect_finite(ctx, {{"out_proj", "x_mid", a.x_mid}});
}

void attention_forward(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor out = attention_in(ctx, lc, w, a, scope);
  project_out(ctx, lc, w, a, out);
}

// Backward of y = linear(norm(x)) with a residual: adds x's gradient to dx, which has the residual's. grad: y's
// gradient. The weight gradient needs norm(x). rmsnorm_backward reads x anyway, so it computes norm(x) again and writes
// it over h, norm(x)'s gradient; in fp8 the norm writes forward's e4m3 again. dnorm, dw: absent if frozen. adapters:
// the linear layer's. index_dw, index_dy: a second linear layer's, which sends no gradient to norm(x); may be absent.
void norm_linear_backward(Context& ctx, const LayerContext& lc, Tensor dx, Tensor dnorm, Tensor dw,
                          const ResultGrad& grad, ConstTensor x, ConstTensor norm, ConstTensor rrms,
                          const Linear& linear, const Adapters& adapters, const LoraTensors<Tensor>& adapters_dw,
                          Tensor index_dw = {}, ConstTensor index_dy = {}) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor h = scope.alloc(dx.dtype, dx.shape(), "dnorm");
  multiply_back(ctx, h, grad, linear);
  const Tensor du = adapt_back(ctx, scope, h, grad.dy, adapters);
  const bool norm_again = !dw.empty() && !grad.rows.empty() && index_dw.empty();
  const bool reads_h = !norm_again && (!dw.empty() || !index_dw.empty() || !du.empty());
  rmsnorm_backward(ctx, dx, grad_or_unused(scope, dnorm, norm), h, x, norm, rrms, dx, reads_h ? h : Tensor{});
  if (norm_again) {
    const E4m3Rows h_rows = alloc_e4m3_rows(scope, x.size(0), x.size(1));
    const Tensor same_rrms = scope.alloc(rrms.dtype, rrms.shape(), "rrms again");
    rmsnorm_forward_e4m3(ctx, h_rows, same_rrms, x, norm, lc.config.norm_eps);
    linear_backward_weight_fp8(ctx, dw, grad.rows, h_rows, lc.add_products, h);
  } else if (!dw.empty()) {
    multiply_weight(ctx, lc, dw, grad, h);
  }
  adapt_weights(ctx, lc, adapters_dw, du, grad.dy, h, adapters);
  if (!index_dw.empty()) linear_backward_weight(ctx, index_dw, index_dy, h, /*add=*/true);
}

// From the gradients of the index's rotated queries, dq in acc, and keys, within dindex: those of what was projected.
void index_backward(Context& ctx, const LayerContext& lc, const Weights& w, const Grads& g, const LayerActivations& a,
                    const QkvViews& dviews, ConstTensor dq) {
  rotate_chunks(ctx, lc, lc.index_rope, [&](auto&& rows, ConstTensor cos, ConstTensor sin, ConstTensor begin) {
    rope_backward(ctx, rows(dviews.index_q), rows(dq), cos, sin, {rows(dviews.index_k)}, {}, begin);
  });
  if (!lc.config.qk_norm) return;
  const QkvViews projected = with_index(dviews, a.index, lc.config);
  qk_norm_backward(ctx, {dviews.index_q, dviews.index_k}, g.index_norm, {dviews.index_q, dviews.index_k},
                   {projected.index_q, projected.index_k}, w.index_norm, lc.config.norm_eps);
  report(ctx, lc, {g.index_norm});
}

// Attention's backward. dx: on entry x_mid's gradient, on return x's.
void attention_backward(Context& ctx, const LayerContext& lc, const Weights& w, const Grads& g, LayerActivations& a,
                        Tensor dx) {
  const ModelConfig& c = lc.config;
  const DType dtype = a.x.dtype;
  Scratch::Scope scope(ctx.scratch);
  UnusedMemory memory(a.mlp_pre, scope);  // this layer's MLP was the first in backward
  const Tensor dqkv = memory.alloc(dtype, a.qkv.shape(), "dqkv");
  const Tensor dindex = a.index.empty() ? Tensor{} : memory.alloc(dtype, a.index.shape(), "dindex");
  {
    Scratch::Scope inner(ctx.scratch);
    UnusedMemory inner_memory = memory.in(inner);
    if (lc.dense) zero(ctx, dqkv);  // the other branches' keys and values have no gradient
    const QkvViews views = attended(lc, attended_qkv(a, c, lc.kind(), lc.B, lc.T)),
                   projected_dviews = split_qkv(dqkv, c, lc.kind(), lc.B, lc.T),
                   all_dviews = dindex.empty() ? projected_dviews : with_index(projected_dviews, dindex, c),
                   dviews = attended(lc, all_dviews);
    const Tensor dout = inner_memory.alloc(dtype, {lc.B, lc.T, c.n_heads, c.d_v}, "dattention");
    const Shape matrix = {lc.B * lc.T, c.n_heads * c.d_v};
    const Linear out_proj = out_proj_of(lc, w);
    UnusedMemory x_mid(a.x_mid, inner);  // only the MLP's backward reads it
    const ResultGrad dx_mid = result_grad(ctx, x_mid, dx, out_proj);
    multiply_back(ctx, dout.view(matrix), dx_mid, out_proj);
    const Adapters adapters = adapters_of(lc, w, LoraPlace::out_proj);
    const Tensor du = adapt_back(ctx, inner, dout.view(matrix), dx, adapters);
    lc.expect_finite(ctx, {{"out_proj backward", "dout", dout}});
    const AttentionGrads grads = attend_backward(ctx, lc, dviews, g.nsa, dout, views, a.attention, w.nsa, inner_memory);
    if (!g.out_proj.empty()) multiply_weight(ctx, lc, g.out_proj, dx_mid, grads.out.view(matrix));
    report(ctx, lc, {g.out_proj});
    adapt_weights(ctx, lc, adapter_grads(g, LoraPlace::out_proj), du, dx, grads.out.view(matrix), adapters);
    for_each_tensor_of_nsa(g.nsa, [&](ParamRole, const Tensor& grad) { report(ctx, lc, {grad}); });
    if (!dindex.empty()) index_backward(ctx, lc, w, g, a, dviews, grads.index_dq);
    rotate_chunks(ctx, lc, lc.rope, [&](auto&& rows, ConstTensor cos, ConstTensor sin, ConstTensor begin) {
      rope_backward(ctx, rows(dviews.q), rows(ConstTensor(grads.dq)), cos, sin, rows_of_keys(dviews.k, rows),
                    rows(ConstTensor(grads.dq_group)), begin);
    });
    lc.expect_finite(ctx, {{"backward of the branches and rope", "dqkv", dqkv},
                           {"backward of the index and rope", "dindex", dindex}});
    if (c.qk_norm) {
      qk_norm_backward(ctx, qk_heads(all_dviews), grad_or_unused(inner, g.qk_norm, w.qk_norm),
                       const_qk_heads(all_dviews), const_qk_heads(split_qkv(a.qkv, c, lc.kind(), lc.B, lc.T)),
                       w.qk_norm, c.norm_eps);
      lc.expect_finite(ctx, {{"qk_norm backward", "dqkv", dqkv}});
      report(ctx, lc, {g.qk_norm});
    }
  }
  if (!g.qkv_bias.empty()) {
    column_sum(ctx, g.qkv_bias, dqkv);
    report(ctx, lc, {g.qkv_bias});
  }
  const Linear qkv = qkv_of(lc, w);
  norm_linear_backward(ctx, lc, dx, g.norm1, g.qkv, result_grad(ctx, scope, dqkv, qkv), a.x, w.norm1, a.rrms1, qkv,
                       adapters_of(lc, w, LoraPlace::qkv), adapter_grads(g, LoraPlace::qkv), g.index, dindex);
  lc.expect_finite(ctx, {{"backward of the projections and rmsnorm", "dx", dx}});
  report(ctx, lc, {g.norm1, g.qkv, g.index});
}

// The halves of SwiGLU's columns: gate and up, or their gradients.
template <class T>
std::pair<T, T> halves(const T& pre) {
  const int64_t hidden = pre.size(1) / 2;
  return {pre.slice(1, 0, hidden), pre.slice(1, hidden, 2 * hidden)};
}

Tensor alloc_act(const LayerContext& lc, const LayerActivations& a, Scratch::Scope& scope) {
  return scope.alloc(a.x.dtype, {a.x.size(0), lc.config.mlp_hidden}, "activation");
}

// The MLP up to its activation: reads a.x_mid, writes a.mlp_pre and act, the activation's output. With a first matrix
// in fp8 act may be absent.
void mlp_in(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a, Tensor act) {
  Scratch::Scope scope(ctx.scratch);
  const bool silu = lc.config.mlp == MlpKind::silu;
  if (const Linear in = mlp_in_of(lc, w); takes_fp8(in)) {
    multiply_normed(ctx, a.mlp_pre, a.rrms2, a.x_mid, w.norm2, lc.config.norm_eps, in);
    const auto [gate, up] = halves(a.mlp_pre);
    if (!act.empty()) silu ? silu_forward(ctx, act, a.mlp_pre) : swiglu_forward(ctx, act, gate, up);
  } else {
    const Tensor h = scope.alloc(a.x.dtype, a.x.shape(), "norm2(x_mid)");
    rmsnorm_forward(ctx, h, a.rrms2, a.x_mid, w.norm2, lc.config.norm_eps);
    record_if_not_fp8(ctx, in, a.mlp_pre);
    if (const Adapters adapters = adapters_of(lc, w, LoraPlace::mlp_in); adapters.pieces.empty()) {
      (silu ? linear_silu_forward : linear_swiglu_forward)(ctx, act, a.mlp_pre, h, w.mlp_in);
    } else {
      linear_forward(ctx, a.mlp_pre, h, w.mlp_in);
      adapt(ctx, a.mlp_pre, h, adapters);
      const auto [gate, up] = halves(a.mlp_pre);
      silu ? silu_forward(ctx, act, a.mlp_pre) : swiglu_forward(ctx, act, gate, up);
    }
  }
  lc.expect_finite(ctx, {{"rmsnorm, first mlp matrix", "mlp_pre", a.mlp_pre}});
}

void mlp_forward(Context& ctx, const LayerContext& lc, const Weights& w, LayerActivations& a, Tensor x_out) {
  Scratch::Scope scope(ctx.scratch);
  const Linear out = mlp_out_of(lc, w);
  if (takes_fp8(mlp_in_of(lc, w)) && takes_fp8(out)) {
    mlp_in(ctx, lc, w, a, {});
    const E4m3Rows act = alloc_e4m3_rows(scope, x_out.size(0), lc.config.mlp_hidden);
    const auto [gate, up] = halves(a.mlp_pre);
    if (lc.config.mlp == MlpKind::silu)
      silu_forward_e4m3(ctx, act, a.mlp_pre);
    else
      swiglu_forward_e4m3(ctx, act, gate, up);
    count(ctx, out.x_counts, act);
    linear_forward_fp8(ctx, x_out, act, out.w, a.x_mid, out.row_counts);
  } else {
    const Tensor act = alloc_act(lc, a, scope);
    mlp_in(ctx, lc, w, a, act);
    multiply(ctx, x_out, act, out, a.x_mid);
    adapt(ctx, x_out, act, adapters_of(lc, w, LoraPlace::mlp_out));
  }
  lc.expect_finite(ctx, {{"activation, last mlp matrix", "x_out", x_out}});
}

// What the MLP's backward has in e4m3 alone, if both of its matrices are in fp8, else empty: pre's gradient and the
// activation's output. A row of both lies in the row of pre that it is made from.
struct MlpCasts {
  E4m3Rows dpre, act;
  bool empty() const { return act.empty(); }
};
MlpCasts alloc_mlp_casts(const LayerContext& lc, const Weights& w, const Tensor& pre, Scratch::Scope& scope) {
  if (!takes_fp8(mlp_in_of(lc, w)) || !takes_fp8(mlp_out_of(lc, w))) return {};
  const int64_t N = pre.size(0), width = pre.size(1), hidden = lc.config.mlp_hidden;
  const Tensor bytes(pre.data, DType::u8, {N, width * size_of(pre.dtype)}, pre.device);
  const auto scales = [&] { return scope.alloc(DType::f32, {N}, "scales of e4m3 rows"); };
  return {{bytes.slice(1, 0, width), scales()}, {bytes.slice(1, width, width + hidden), scales()}};
}

// Backward of the MLP's last matrix and activation, from its result's gradient: writes `casts`, or without them
// replaces pre by its gradient, and act by the activation's output. Returns the du of the matrix's adapters.
Tensor activate_back(Context& ctx, const LayerContext& lc, const Weights& w, Tensor pre, const MlpCasts& casts,
                     Tensor act, const ResultGrad& grad, Scratch::Scope& scope) {
  const bool silu = lc.config.mlp == MlpKind::silu;
  const Linear out = mlp_out_of(lc, w);
  const Adapters adapters = adapters_of(lc, w, LoraPlace::mlp_out);
  if (!takes_fp8(out) && adapters.pieces.empty()) {
    record_if_not_fp8(ctx, out, act);
    (silu ? linear_silu_backward : linear_swiglu_backward)(ctx, pre, act, grad.dy, w.mlp_out, pre);
    return {};
  }
  multiply_back(ctx, act, grad, out);
  const Tensor du = adapt_back(ctx, scope, act, grad.dy, adapters);
  const auto [gate, up] = halves(pre);
  if (!casts.empty())
    (silu ? silu_backward_e4m3 : swiglu_backward_e4m3)(ctx, casts.dpre, casts.act, act, pre);
  else
    silu ? silu_backward(ctx, pre, act, pre, act) : swiglu_backward(ctx, gate, up, act, gate, up, act);
  return du;
}

// The MLP's backward, which replaces a.mlp_pre by its gradient. dx: on entry x_out's gradient, on return x_mid's.
void mlp_backward(Context& ctx, const LayerContext& lc, const Weights& w, const Grads& g, LayerActivations& a,
                  Tensor dx) {
  const Tensor dpre = a.mlp_pre;
  const Linear in = mlp_in_of(lc, w), out = mlp_out_of(lc, w);
  Scratch::Scope scope(ctx.scratch);
  const MlpCasts casts = alloc_mlp_casts(lc, w, dpre, scope);
  {
    Scratch::Scope inner(ctx.scratch);
    const Tensor act = alloc_act(lc, a, inner);
    const ResultGrad grad = result_grad(ctx, inner, dx, out);
    const Tensor du = activate_back(ctx, lc, w, dpre, casts, act, grad, inner);
    if (!g.mlp_out.empty()) {
      if (casts.empty())
        multiply_weight(ctx, lc, g.mlp_out, grad, act);
      else
        linear_backward_weight_fp8(ctx, g.mlp_out, grad.rows, casts.act, lc.add_products, act);
    }
    report(ctx, lc, {g.mlp_out});
    adapt_weights(ctx, lc, adapter_grads(g, LoraPlace::mlp_out), du, dx, act, adapters_of(lc, w, LoraPlace::mlp_out));
  }
  if (!casts.empty()) count(ctx, in.dy_counts, casts.dpre);
  norm_linear_backward(
      ctx, lc, dx, g.norm2, g.mlp_in, casts.empty() ? result_grad(ctx, scope, dpre, in) : ResultGrad{dpre, casts.dpre},
      a.x_mid, w.norm2, a.rrms2, in, adapters_of(lc, w, LoraPlace::mlp_in), adapter_grads(g, LoraPlace::mlp_in));
  lc.expect_finite(ctx,
                   {{"backward of the last mlp matrix and activation", "dpre", casts.empty() ? dpre : casts.dpre.scale},
                    {"backward of the first mlp matrix and rmsnorm", "dx", dx}});
  report(ctx, lc, {g.norm2, g.mlp_in});
}

}  // namespace

void layer_forward(Context& ctx, const LayerContext& lc, const Weights& weights, LayerActivations& a, Tensor x_out) {
  attention_forward(ctx, lc, weights, a);
  mlp_forward(ctx, lc, weights, a, x_out);
}

void layer_replay(Context& ctx, const LayerContext& lc, const Weights& weights, LayerActivations& a,
                  const RecomputePlan& plan) {
  const auto replays = [&](LayerPart part) { return plan.replays(lc.layer, part); };
  LayerContext again = lc;
  again.keep_block_index = true, again.teaches_index = false;  // lists and the index's lse are kept
  again.fp8_counts = {};                                       // forward has counted
  Scratch::Scope scope(ctx.scratch);
  if (replays(LayerPart::attention)) {
    Scratch::Scope inner(ctx.scratch);
    const Tensor out = attention_in(ctx, again, weights, a, inner);
    if (replays(LayerPart::out_proj)) project_out(ctx, again, weights, a, out);
  } else if (replays(LayerPart::qk) && lc.config.qk_norm) {
    norm_and_rotate(ctx, lc, weights, a);
  }
  // The activation's output is computed too, although backward computes it again: only the fused kernel that forward
  // used gives the same mlp_pre bits.
  if (replays(LayerPart::mlp_in))
    mlp_in(ctx, again, weights, a, takes_fp8(mlp_in_of(lc, weights)) ? Tensor{} : alloc_act(lc, a, scope));
}

void layer_backward(Context& ctx, const LayerContext& lc, const Weights& weights, const Grads& grads,
                    LayerActivations& a, Tensor dx) {
  mlp_backward(ctx, lc, weights, grads, a, dx);
  attention_backward(ctx, lc, weights, grads, a, dx);
}

}  // namespace triad
