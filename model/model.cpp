#include "model/model.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/check.h"
#include "engine/process/progress.h"
#include "kernels/ops/classifier.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/rmsnorm.h"
#include "kernels/ops/rope.h"
#include "model/sequence/attention.h"

namespace triad {

namespace {

void need(WeightGate* gate, const Context& ctx, std::initializer_list<int64_t> segments) {
  if (gate == nullptr) return;
  for (const int64_t segment : segments) gate->need(segment, ctx.stream);
}

// Adds to a model's tensors those that another set of parameters has.
void add_tensors(ModelTensors<ConstTensor>& all, ModelTensors<ConstTensor> other) {
  const auto add = [](ConstTensor& tensor, const ConstTensor& its) {
    if (tensor.empty()) tensor = its;
  };
  add(all.embed, other.embed);
  add(all.norm_f, other.norm_f);
  add(all.head, other.head);
  for (size_t i = 0; i < all.layers.size(); ++i) {
    std::vector<ConstTensor> its;
    for_each_tensor(other.layers[i], [&](ParamRole, const ConstTensor& tensor) { its.push_back(tensor); });
    size_t next = 0;
    for_each_tensor(all.layers[i], [&](ParamRole, ConstTensor& tensor) { add(tensor, its[next++]); });
  }
}

}  // namespace

Model::Model(Context& ctx, Arena& arena, const ModelConfig& config, const Options& options)
    : config_(config),
      options_(options),
      exec_(options.group == nullptr ? whole_sequences() : shared_sequences(*options.group)),
      params_(arena, config,
              {.dtype = options.dtype,
               .master = options.training && options.master && options.dtype == DType::bf16,
               .grads = options.training,
               .shard_elements = options.shard_elements,
               .weight_windows = options.weight_windows,
               .grad_windows = options.grad_windows,
               .specs = options.lora ? std::optional(trained_specs(config, options.lora)) : std::nullopt}),
      w_(params_.weight_tensors()) {
  if (options.training) g_ = params_.grad_tensors();
  if (options.lora) {
    base_.emplace(
        arena, config,
        Params::Options{
            .dtype = options.dtype, .specs = frozen_specs(config, options.lora), .weights_name = "frozen weights"});
    add_tensors(w_, base_->weight_tensors());
    lora_ = lora_layers(config, options.lora);
  }
  if (std::ranges::find(options.fp8_layers, true) != options.fp8_layers.end()) {
    TRIAD_CHECK(!options.lora,
                "a model with adapters has no layers in fp8: their backward overwrites what adapters read");
    check_fp8(ctx, options.dtype);
  }
  const auto make_tables = [&](int64_t width, bool rotates, const std::string& suffix) {
    if (rope_.contains({width, rotates})) return;
    const auto alloc = [&](const char* name) {
      return arena.alloc(MemTag::workspace, fmt::format("{}{}{}", name, suffix, rotates ? "" : ", no rotation"),
                         acc_dtype(options.dtype), {options.max_seq_len, width / 2});
    };
    const Tensor cos = alloc("rope cos"), sin = alloc("rope sin");
    rope_table(ctx, cos, sin, width, rotates ? config.rope() : kNoRotation);
    rope_[{width, rotates}] = {cos, sin};
  };
  for (int64_t i = 0; i < config.n_layers; ++i) {
    make_tables(config.d_k, config.rotates(i), "");
    if (const int64_t width = config.nsa_at(i).d_index; config.has_index(i))
      make_tables(width, config.rotates(i), fmt::format(" of the index, width {}", width));
  }
  if (!config.has_index() || !options.training) return;
  index_loss_ = arena.alloc(MemTag::workspace, "index loss", DType::f64, {config.n_layers});
  zero(ctx, index_loss_);
}

LayerContext Model::layer_context(const Activations& act, int64_t layer) const {
  const SequenceLayout& layout = act.layout();
  TRIAD_CHECK(layout.shared() == (options_.group != nullptr), "{} ranks share a sequence, and the model has {} group",
              layout.ranks, options_.group == nullptr ? "no" : "a");
  Documents documents = act.documents_of(layer);
  documents.part = layout.row_part();
  const bool has_index = layer >= 0 && config_.has_index(layer);
  return {.config = config_,
          .exec = *exec_,
          .rope = layer < 0 ? RopeTables{} : rope(layer),
          .index_rope = has_index ? index_rope(layer) : RopeTables{},
          .B = act.B(),
          .T = act.T(),
          .documents = documents,
          .layout = layout,
          .keep_block_index = keep_block_index_,
          .teaches_index = options_.training && config_.has_index(),
          .index_loss = index_loss_,
          .padding_begin = act.padding_begin,
          .dense = dense_,
          .asserts = asserts_,
          .layer = layer,
          .fp8 = layer >= 0 && !options_.fp8_layers.empty() && options_.fp8_layers[static_cast<size_t>(layer)],
          .fp8_counts = fp8_counts_,
          .lora = lora_.empty() || layer < 0 ? nullptr : &lora_[static_cast<size_t>(layer)]};
}

void Model::forward(Context& ctx, Activations& act, LayerStats* stats, WeightGate* gate,
                    const AfterLayer& after_layer) {
  TRIAD_CHECK(act.layout().tokens() <= options_.max_seq_len, "a batch of {} tokens a sequence for a model built for {}",
              act.layout().tokens(), options_.max_seq_len);
  if (asserts_ != nullptr) {
    asserts_->begin_pass(dense_);
    asserts_->enter("forward");
    asserts_->range(ctx, "tokens", act.tokens, 0, config_.vocab_size);
    asserts_->range(ctx, "targets", act.targets, -1, config_.vocab_size);
  }
  if (!act.bounds.empty())
    for (const auto& [l_sel, tables] : act.documents) nsa_document_tables(ctx, tables, act.bounds, l_sel);
  const Segments& segments = params_.segments();
  if (gate != nullptr) gate->begin_forward();
  need(gate, ctx, {segments.rest(), segments.embed()});
  embedding_forward(ctx, act.x(0), act.tokens.view({act.rows()}), w_.embed);
  layer_context(act, -1).expect_finite(ctx, {{"embedding", "x", act.x(0)}});
  for (int64_t i = 0; i < config_.n_layers; ++i) {
    ctx.routes.set_layer(i);
    report_stage(ctx, Stage::forward, i);
    need(gate, ctx, {i});
    LayerContext lc = layer_context(act, i);
    lc.stats = stats;
    layer_forward(ctx, lc, w_.layers[i], act.layer(i), act.x(i + 1));
    if (after_layer) after_layer(i, act.layer(i));
  }
  ctx.routes.set_layer(-1);
  need(gate, ctx, {segments.head()});
}

Tensor Model::final_norm(Context& ctx, Activations& act, int64_t begin, int64_t end, Scratch::Scope& scope) {
  const Tensor x = act.x(config_.n_layers).slice(0, begin, end);
  Tensor h = scope.alloc(x.dtype, x.shape(), "norm_f(x)");
  rmsnorm_forward(ctx, h, act.rrms_final.slice(0, begin, end), x, w_.norm_f, config_.norm_eps);
  return h;
}

void Model::loss(Context& ctx, Activations& act, int64_t begin, int64_t end) {
  report_stage(ctx, Stage::head);
  Scratch::Scope scope(ctx.scratch);
  const Tensor h = final_norm(ctx, act, begin, end, scope);
  classifier_forward(ctx, act.row_loss.slice(0, begin, end), h, w_.head,
                     act.targets.view({act.rows()}).slice(0, begin, end), {.vocab = config_.vocab_size});
  layer_context(act, -1).expect_finite(ctx, {{"final norm, head, cross-entropy", "row_loss", act.row_loss}});
}

void Model::logits(Context& ctx, Activations& act, int64_t begin, Tensor logits) {
  Scratch::Scope scope(ctx.scratch);
  linear_forward(ctx, logits, final_norm(ctx, act, begin, begin + logits.size(0), scope), w_.head);
}

void Model::open_grads(Context& ctx, GradSink* sink, int64_t segment) {
  if (sink != nullptr) sink->open(segment, ctx.stream);
  params_.open_grads(ctx, segment);
}

void Model::loss_and_backward(Context& ctx, Activations& act, const LossScales& scales, bool first, GradSink* sink,
                              WeightGate* gate) {
  TRIAD_CHECK(options_.training, "backward of a model that was built without gradients");
  const Segments& segments = params_.segments();
  first = first || options_.grad_windows;
  report_stage(ctx, Stage::head);
  if (gate != nullptr) gate->begin_backward();
  need(gate, ctx, {segments.rest(), segments.head()});
  open_grads(ctx, sink, segments.rest());
  open_grads(ctx, sink, segments.head());
  Scratch::Scope scope(ctx.scratch);
  const LayerContext outside = layer_context(act, -1);
  const Tensor x = act.x(config_.n_layers);
  Tensor dx = scope.alloc(x.dtype, x.shape(), "dx");
  rmsnorm_forward(ctx, dx, act.rrms_final, x, w_.norm_f, config_.norm_eps);  // the classifier overwrites it
  classifier_forward_backward(ctx, act.row_loss, dx, g_.head, dx, w_.head, act.targets.view({act.rows()}), scales.loss,
                              {.vocab = config_.vocab_size, .add_dw = !first});
  outside.expect_finite(ctx, {{"final norm, head, cross-entropy", "row_loss", act.row_loss}});
  if (sink != nullptr && !config_.tie_embeddings && !g_.head.empty()) sink->ready(g_.head, ctx.stream);
  if (asserts_ != nullptr) asserts_->enter("backward");
  outside.expect_finite(ctx, {{"cross-entropy and head backward", "dh", dx}});
  rmsnorm_backward(ctx, dx, grad_or_unused(scope, g_.norm_f, w_.norm_f), dx, x, w_.norm_f, act.rrms_final);
  outside.expect_finite(ctx, {{"final norm backward", "dx", dx}});
  if (sink != nullptr && !g_.norm_f.empty()) sink->ready(g_.norm_f, ctx.stream);
  for (int64_t i = config_.n_layers - 1; i >= 0; --i) {
    ctx.routes.set_layer(i);
    report_stage(ctx, Stage::backward, i);
    LayerContext lc = layer_context(act, i);
    lc.add_products = !first;
    lc.index_scale = scales.index;
    lc.sink = sink;
    need(gate, ctx, {i});
    open_grads(ctx, sink, i);
    if (asserts_ != nullptr) asserts_->enter("recompute");
    layer_replay(ctx, lc, w_.layers[i], act.layer(i), act.recompute());
    if (asserts_ != nullptr) asserts_->enter("backward");
    layer_backward(ctx, lc, w_.layers[i], g_.layers[i], act.layer(i), dx);
  }
  ctx.routes.set_layer(-1);
  if (g_.embed.empty()) return;  // frozen
  report_stage(ctx, Stage::embedding);
  if (!config_.tie_embeddings) open_grads(ctx, sink, segments.embed());
  embedding_backward(ctx, g_.embed, dx, act.tokens.view({act.rows()}));
  if (sink != nullptr) sink->ready(g_.embed, ctx.stream);
}

}  // namespace triad
