#include "model/decoding/decode.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/check.h"
#include "kernels/decode/argmax.h"
#include "kernels/decode/skinny_linear.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

// Takes `first` off each block id in shared lists [..] i32 (-1: no block). The host does it, once for each text of a
// pass but the first, and few models share lists (nsa.select_every).
void count_from(Context& ctx, const Tensor& lists, int64_t first) {
  if (first == 0 || ctx.planning) return;
  std::vector<int32_t> ids(static_cast<size_t>(lists.numel()));
  read(ctx, ids.data(), lists);
  for (int32_t& id : ids)
    if (id >= 0) id -= static_cast<int32_t>(first);
  write(ctx, lists, ids.data());
}

}  // namespace

Decoder::LayerCache Decoder::alloc_cache(Arena& arena, const ModelConfig& c, int64_t B, int64_t S, DType dtype,
                                         int64_t layer) {
  const auto alloc_heads = [&](const char* name, int64_t rows, int64_t heads, int64_t width) {
    return arena.alloc(MemTag::activations, fmt::format("cache{:02}.{}", layer, name), dtype, {B, rows, heads, width});
  };
  const auto alloc = [&](const char* name, int64_t rows, int64_t width) {
    return alloc_heads(name, rows, c.n_kv_groups, width);
  };
  const NsaConfig& n = c.nsa_at(layer);
  const Tensor index_k = c.has_index(layer) ? alloc_heads("index_k", S, 1, n.d_index) : Tensor{};
  const Tensor lists = c.has_lists(layer) && n.every > 1
                           ? arena.alloc(MemTag::activations, fmt::format("cache{:02}.block_index", layer), DType::i32,
                                         {B, 1, c.n_kv_groups, n.n_sel})
                           : Tensor{};
  const int64_t W = std::min(n.w, S);
  switch (c.attention_of(layer)) {
    case AttentionKind::dense:
    case AttentionKind::selected:
      return {.nsa = {}, .dense = {alloc("k", S, c.d_k), alloc("v", S, c.d_v)}, .index_k = index_k, .lists = lists};
    case AttentionKind::window:
      return {.nsa = {}, .dense = {alloc("k_win", W, c.d_k), alloc("v_win", W, c.d_v)}, .index_k = {}, .lists = {}};
    case AttentionKind::nsa: {
      const int64_t Tc = compressed_length(S, n.l, n.d);
      return {.nsa = {.k_sel = alloc("k_sel", S, c.d_k),
                      .v_sel = alloc("v_sel", S, c.d_v),
                      .k_win = alloc("k_win", W, c.d_k),
                      .v_win = alloc("v_win", W, c.d_v),
                      .k_cmp = alloc("k_cmp", Tc, c.d_k),
                      .v_cmp = alloc("v_cmp", Tc, c.d_v),
                      .k_raw = alloc("k_raw", n.l, c.d_k),
                      .v_raw = alloc("v_raw", n.l, c.d_v)},
              .dense = {},
              .index_k = index_k,
              .lists = lists};
    }
  }
  return {};
}

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
  int64_t widest = 0, widest_index = 0, longest_list = 0;
  for (int64_t i = 0; i < c.n_layers; ++i) {
    widest = std::max(widest, qkv_width(c, c.attention_of(i)));
    if (!c.has_index(i)) continue;
    widest_index = std::max(widest_index, index_width(c, i));
    longest_list = std::max(longest_list, c.nsa_at(i).n_sel);
  }
  qkv_ = arena.alloc(MemTag::activations, "step.qkv", dtype, {B * widest});
  attended_ = arena.alloc(MemTag::activations, "step.attended", dtype, {B, c.n_heads * c.d_v});
  hidden_ = arena.alloc(MemTag::activations, "step.hidden", dtype, {B, c.mlp_hidden});
  if (c.has_index()) {
    index_ = arena.alloc(MemTag::activations, "step.index", dtype, {B * widest_index});
    lists_ = arena.alloc(MemTag::activations, "step.block_index", DType::i32, {B * c.n_kv_groups * longest_list});
  }
  for (int64_t i = 0; i < c.n_layers; ++i) caches_.push_back(alloc_cache(arena, c, B, S, dtype, i));
}

void Decoder::forget(Context& ctx, std::span<const int64_t> sequences) {
  for (const int64_t b : sequences) length_[static_cast<size_t>(b)] = 0;
  write_positions(ctx);
}

void Decoder::write_positions(Context& ctx) {
  std::vector<int32_t> next;
  for (const int64_t n : length_) next.push_back(static_cast<int32_t>(std::min(n, capacity_ - 1)));
  write(ctx, position, next.data());
}

// Fills a layer's caches from a pass over T tokens.
void Decoder::fill_caches(Context& ctx, int64_t layer, LayerActivations& a, int64_t T,
                          std::span<const Prompt> prompts) {
  const ModelConfig& c = model_.config();
  const NsaConfig& n = c.nsa_at(layer);
  const AttentionKind kind = c.attention_of(layer);
  const LayerCache& cache = caches_[static_cast<size_t>(layer)];
  const QkvViews views = attended_qkv(a, c, kind, 1, T);
  if (!cache.index_k.empty()) index_cache_fill(ctx, cache.index_k, prompts, views.index_k);
  if (!cache.lists.empty())
    for (size_t i = 0; i < prompts.size(); ++i) {
      const Prompt& p = prompts[i];
      const int64_t last = p.begin + p.n - 1;
      const Tensor lists = cache.lists.slice(0, p.b, p.b + 1);
      copy(ctx, lists, a.attention.nsa.block_index.slice(1, last, last + 1));
      count_from(ctx, lists, p.begin / n.l_sel + static_cast<int64_t>(i));
    }
  if (kind == AttentionKind::nsa)
    nsa_cache_fill(ctx, cache.nsa, prompts, nsa_in(views), a.attention.nsa.k_cmp, a.attention.nsa.v_cmp, n);
  else
    dense_cache_fill(ctx, cache.dense, prompts, views.k[0], views.v[0]);
}

// Computes the logits after each prompt. In a pass over several, one product has the last rows of all, or of
// kMostRows each. It always has that many rows, because their bits may depend on the number.
void Decoder::last_logits(Context& ctx, Activations& act, std::span<const Prompt> prompts) {
  if (act.bounds.empty()) {
    const auto& [b, begin, n] = prompts[0];
    return model_.logits(ctx, act, begin + n - 1, logits.slice(0, b, b + 1));
  }
  const ModelConfig& c = model_.config();
  const Tensor x = act.x(c.n_layers);
  Scratch::Scope scope(ctx.scratch);
  const Tensor last = scope.alloc(x.dtype, {kMostRows, x.size(1)}, "prompts' last rows");
  const Tensor product = scope.alloc(logits.dtype, {kMostRows, logits.size(1)}, "prompts' logits");
  zero(ctx, last);
  for (size_t i = 0; i < prompts.size(); i += kMostRows) {
    const auto some = prompts.subspan(i, std::min<size_t>(kMostRows, prompts.size() - i));
    for (size_t j = 0; j < some.size(); ++j) copy(ctx, last[static_cast<int64_t>(j)], x[some[j].begin + some[j].n - 1]);
    skinny_linear(ctx, product, last, model_.weights().head, {.norm = model_.weights().norm_f, .eps = c.norm_eps});
    for (size_t j = 0; j < some.size(); ++j) copy(ctx, logits[some[j].b], product[static_cast<int64_t>(j)]);
  }
}

void Decoder::prefill(Context& ctx, Activations& act, std::span<const Prompt> prompts) {
  TRIAD_CHECK(act.B() == 1 && !prompts.empty() && (!act.bounds.empty() || prompts.size() == 1),
              "a prefill of {} prompts in {} rows", prompts.size(), act.B());
  for (const Prompt& p : prompts)
    TRIAD_CHECK(p.n >= 1 && p.begin >= 0 && p.begin + p.n <= act.T() && p.n <= capacity_,
                "a prefill of {} tokens from {} on: a pass over {} tokens, a cache of {}", p.n, p.begin, act.T(),
                capacity_);
  for (size_t i = 0; i < prompts.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      TRIAD_CHECK(prompts[i].b != prompts[j].b, "a prefill starts sequence {} twice", prompts[i].b);
  model_.forward(ctx, act, nullptr, nullptr,
                 [&](int64_t layer, LayerActivations& a) { fill_caches(ctx, layer, a, act.T(), prompts); });
  last_logits(ctx, act, prompts);
  for (const Prompt& p : prompts) length_[static_cast<size_t>(p.b)] = p.n;
  write_positions(ctx);
}

Tensor Decoder::qkv_of(int64_t layer) const {
  const ModelConfig& c = model_.config();
  const int64_t width = qkv_width(c, c.attention_of(layer));
  return qkv_.slice(0, 0, B() * width).view({B(), width});
}

Tensor Decoder::lists_of(int64_t layer) const {
  const ModelConfig& c = model_.config();
  const Tensor& kept = caches_[static_cast<size_t>(layer)].lists;
  if (!kept.empty() || !c.has_index(layer)) return kept;
  const int64_t n = c.nsa_at(layer).n_sel;
  return lists_.slice(0, 0, B() * c.n_kv_groups * n).view({B(), 1, c.n_kv_groups, n});
}

void Decoder::layer_step(Context& ctx, int64_t layer, const DecodeProbe& probe) {
  const ModelConfig& c = model_.config();
  const LayerTensors<ConstTensor>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const Tensor qkv = qkv_of(layer);
  skinny_linear(ctx, qkv, x_, w.qkv, {.norm = w.norm1, .eps = c.norm_eps, .addend = repeat_row(w.qkv_bias, B())});
  // A part of the selected branch: a probe that leaves that out measures a step without the index.
  if (c.has_index(layer) && probe.run[static_cast<size_t>(Branch::sel)]) list_by_index(ctx, layer);
  attend(ctx, layer, probe);
  skinny_linear(ctx, x_, attended_, w.out_proj, {.addend = x_});
  const auto activation =
      c.mlp == MlpKind::silu ? SkinnyLinearOptions::Activation::silu : SkinnyLinearOptions::Activation::swiglu;
  skinny_linear(ctx, hidden_, x_, w.mlp_in, {.norm = w.norm2, .eps = c.norm_eps, .activation = activation});
  skinny_linear(ctx, x_, hidden_, w.mlp_out, {.addend = x_});
}

// Extends the layer's cache of index keys by the token whose input is x_, and computes its lists.
void Decoder::list_by_index(Context& ctx, int64_t layer) {
  const ModelConfig& c = model_.config();
  const LayerTensors<ConstTensor>& w = model_.weights().layers[static_cast<size_t>(layer)];
  const int64_t width = index_width(c, layer);
  const Tensor index = index_.slice(0, 0, B() * width).view({B(), width});
  skinny_linear(ctx, index, x_, w.index, {.norm = w.norm1, .eps = c.norm_eps});
  const QkvViews views = with_index(split_qkv(qkv_of(layer), c, c.attention_of(layer), B(), 1), index, c);
  const QkHeads heads = {views.index_q, views.index_k};
  if (c.qk_norm) qk_norm_forward(ctx, heads, {views.index_q, views.index_k}, w.index_norm, c.norm_eps);
  const Tensor& cache = caches_[static_cast<size_t>(layer)].index_k;
  const RopeTables& angles = model_.index_rope(layer);
  index_cache_append(ctx, cache, views.index_q, views.index_k, position, angles.cos, angles.sin);
  index_decode(ctx, lists_of(layer), views.index_q, cache, position, c.nsa_at(layer));
}

// Extends the layer's cache by the token in qkv_, and computes attended_.
void Decoder::attend(Context& ctx, int64_t layer, const DecodeProbe& probe) {
  const ModelConfig& c = model_.config();
  const LayerTensors<ConstTensor>& weights = model_.weights().layers[static_cast<size_t>(layer)];
  const NsaWeights& w = weights.nsa;
  const AttentionKind kind = c.attention_of(layer);
  const LayerCache& cache = caches_[static_cast<size_t>(layer)];
  const QkvViews views = split_qkv(qkv_of(layer), c, kind, B(), 1);
  const Tensor out = attended_.view({B(), 1, c.n_heads, c.d_v});
  if (c.qk_norm) qk_norm_forward(ctx, qk_heads(views), const_qk_heads(views), weights.qk_norm, c.norm_eps);
  const NsaConfig& options = c.nsa_at(layer);
  const RopeTables& angles = model_.rope(layer);
  if (kind == AttentionKind::nsa) {
    nsa_cache_append(ctx, cache.nsa, views.q, nsa_in(views), position, angles.cos, angles.sin, w, options);
    const Tensor lists = lists_of(layer);
    const bool given = c.has_index(layer);
    return nsa_decode(ctx, out,
                      {.q = views.q,
                       .cache = cache.nsa,
                       .position = position,
                       .lists = given ? lists : Tensor{},
                       .shared_lists = given ? Tensor{} : lists},
                      w.gate, options, probe);
  }
  dense_cache_append(ctx, cache.dense, views.q, views.k[0], views.v[0], position, angles.cos, angles.sin);
  if (kind == AttentionKind::selected)
    selected_decode(ctx, out, {views.q, cache.dense, position}, lists_of(layer), options.l_sel, probe);
  else
    dense_decode(ctx, out, {views.q, cache.dense, position}, probe);
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
