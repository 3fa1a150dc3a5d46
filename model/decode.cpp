#include "model/decode.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/check.h"
#include "kernels/decode/argmax.h"
#include "kernels/decode/skinny_linear.h"
#include "kernels/ops/embedding.h"

namespace triad {

namespace {

NsaCache alloc_cache(Arena& arena, const ModelConfig& c, int64_t B, int64_t S, DType dtype, int64_t layer) {
  const auto alloc = [&](const char* name, int64_t rows, int64_t width) {
    return arena.alloc(MemTag::activations, fmt::format("cache{:02}.{}", layer, name), dtype,
                       {B, rows, c.n_kv_groups, width});
  };
  NsaCache cache;
  const int64_t W = c.dense() ? S : std::min(c.nsa.w, S);
  cache.k_win = alloc("k_win", W, c.d_k), cache.v_win = alloc("v_win", W, c.d_v);
  if (c.dense()) return cache;
  const int64_t Tc = compressed_length(S, c.nsa.l, c.nsa.d);
  cache.k_sel = alloc("k_sel", S, c.d_k), cache.v_sel = alloc("v_sel", S, c.d_v);
  cache.k_cmp = alloc("k_cmp", Tc, c.d_k), cache.v_cmp = alloc("v_cmp", Tc, c.d_v);
  cache.k_raw = alloc("k_raw", c.nsa.l, c.d_k), cache.v_raw = alloc("v_raw", c.nsa.l, c.d_v);
  return cache;
}

NsaIn rows_of(const QkvViews& views) {
  NsaIn in{views.q, {}, {}};
  for (int b = 0; b < 3; ++b) in.k[b] = views.k[b], in.v[b] = views.v[b];
  return in;
}

}  // namespace

Decoder::Decoder(Context& ctx, Arena& arena, Model& model, int64_t B, int64_t S)
    : model_(model), capacity_(S), length_(static_cast<size_t>(B), 0) {
  const ModelConfig& c = model.config();
  TRIAD_CHECK(B >= 1 && S >= 1 && S <= model.max_seq_len(), "a cache for {} x {} tokens, of a model built for {}", B, S,
              model.max_seq_len());
  check_sequences(ctx.device, c, B);
  const DType dtype = model.dtype();
  tokens = arena.alloc(MemTag::io, "next tokens", DType::i32, {B});
  position = arena.alloc(MemTag::io, "positions", DType::i32, {B});
  zero(ctx, position);
  logits = arena.alloc(MemTag::io, "logits", dtype, {B, c.padded_vocab()});
  x_ = arena.alloc(MemTag::activations, "step.x", dtype, {B, c.dim});
  qkv_ = arena.alloc(MemTag::activations, "step.qkv", dtype, {B, qkv_width(c)});
  attended_ = arena.alloc(MemTag::activations, "step.attended", dtype, {B, c.n_heads * c.d_v});
  hidden_ = arena.alloc(MemTag::activations, "step.hidden", dtype, {B, c.mlp_hidden});
  for (int64_t i = 0; i < c.n_layers; ++i) layers_.push_back(alloc_cache(arena, c, B, S, dtype, i));
}

void Decoder::forget(Context& ctx, int64_t b) {
  length_[static_cast<size_t>(b)] = 0;
  zero(ctx, position.slice(0, b, b + 1));
}

void Decoder::prefill(Context& ctx, Activations& act, int64_t b, int64_t n) {
  TRIAD_CHECK(act.B() == 1 && n >= 1 && n <= act.T() && n <= capacity_,
              "a prefill of {} tokens: a pass over {} x {}, a cache of {}", n, act.B(), act.T(), capacity_);
  model_.forward(ctx, act, nullptr, nullptr, [&](int64_t layer, LayerActivations& a) {
    const QkvViews views = split_qkv(a.qkv, model_.config(), 1, act.T());
    nsa_cache_fill(ctx, layers_[static_cast<size_t>(layer)], b, n, rows_of(views), a.nsa.k_cmp, a.nsa.v_cmp);
  });
  model_.logits(ctx, act, n - 1, logits.slice(0, b, b + 1));
  length_[static_cast<size_t>(b)] = n;
  const int32_t at = static_cast<int32_t>(std::min(n, capacity_ - 1));
  write(ctx, position.slice(0, b, b + 1), &at);
}

void Decoder::layer_step(Context& ctx, int64_t layer, const DecodeProbe& probe) {
  const ModelConfig& c = model_.config();
  const LayerTensors<ConstTensor>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const NsaCache& cache = layers_[static_cast<size_t>(layer)];
  skinny_linear(ctx, qkv_, x_, w.qkv, {.norm = w.norm1, .eps = c.norm_eps});
  const QkvViews views = split_qkv(qkv_, c, B(), 1);
  nsa_cache_append(ctx, cache, views.q, rows_of(views), position, model_.rope_cos(), model_.rope_sin(), w.nsa, c.nsa);
  nsa_decode(ctx, attended_.view({B(), 1, c.n_heads, c.d_v}), {views.q, cache, position}, w.nsa.gate, c.nsa, probe);
  skinny_linear(ctx, x_, attended_, w.out_proj, {.addend = x_});
  const auto activation =
      c.mlp == MlpKind::silu ? SkinnyLinearOptions::Activation::silu : SkinnyLinearOptions::Activation::swiglu;
  skinny_linear(ctx, hidden_, x_, w.mlp_in, {.norm = w.norm2, .eps = c.norm_eps, .activation = activation});
  skinny_linear(ctx, x_, hidden_, w.mlp_out, {.addend = x_});
}

void Decoder::queue(Context& ctx, const DecodeProbe& probe) {
  const ModelConfig& c = model_.config();
  embedding_forward(ctx, x_, tokens, model_.weights().embed);
  for (int64_t i = 0; i < c.n_layers; ++i) {
    ctx.routes.set_layer(i);
    layer_step(ctx, i, probe);
  }
  ctx.routes.set_layer(-1);
  skinny_linear(ctx, logits, x_, model_.weights().head, {.norm = model_.weights().norm_f, .eps = c.norm_eps});
  advance(ctx, position, capacity_ - 1);
}

void Decoder::stepped() {
  for (int64_t& n : length_) n = std::min(n + 1, capacity_);
}

void Decoder::choose_greedy(Context& ctx) { argmax(ctx, tokens, logits, model_.config().vocab_size); }

}  // namespace triad
