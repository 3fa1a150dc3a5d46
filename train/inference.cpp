#include "train/inference.h"

#include <algorithm>
#include <utility>

#include "engine/check.h"
#include "engine/process/text.h"
#include "kernels/common/parallel.h"
#include "kernels/decode/argmax.h"
#include "kernels/nsa/document_bounds.h"
#include "train/checkpoint/adapted_weights.h"
#include "train/config/device_choice.h"
#include "train/step/train_step.h"

namespace triad {

void LoadedModel::build(Runtime& runtime, const Options& o) {
  const ModelConfig& config = source_.config.model;
  if (layout_.shared()) group_ = std::make_unique<SequenceGroup>(runtime.ctx(), *o.comm, layout_);
  model_ = std::make_unique<Model>(
      runtime.ctx(), runtime.arena(), config,
      Model::Options{.dtype = o.dtype,
                     .training = o.training,
                     .max_seq_len = layout_.tokens(),
                     .group = group_.get(),
                     .fp8_layers = std::vector<bool>(static_cast<size_t>(o.fp8 ? config.n_layers : 0), true)});
  model_->attend_densely(o.dense);
  activations_ = std::make_unique<Activations>(runtime.arena(), config, o.batch, o.seq_len, o.dtype, o.training,
                                               RecomputePlan(), o.most_documents, layout_);
}

LoadedModel::LoadedModel(const Options& options) : source_(find_model(options.checkpoint)) {
  Options o = options;
  if (o.begun) source_.config.model = *o.begun;
  if (o.seq_len == 0) o.seq_len = source_.config.train.longest_seq_len();
  if (o.device.is_cuda() && o.dtype == DType::f64) fail_usage("--dtype f64 runs on the CPU only");
  seq_len_ = o.seq_len;
  layout_ = SequenceLayout::of(seq_len_, o.comm == nullptr ? 1 : o.comm->world(),
                               o.comm == nullptr ? 0 : o.comm->rank(), o.device, config().model.tokens_per_list());
  int64_t arena_bytes = 0, scratch_bytes = 0;
  {
    Runtime planned({.device = o.device, .planning = true});
    build(planned, o);
    model_->forward(planned.ctx(), *activations_);
    model_->loss(planned.ctx(), *activations_);
    if (o.training) model_->loss_and_backward(planned.ctx(), *activations_, 1);
    logits(planned.ctx(), 0, std::min(kLogitRows, activations_->rows()));
    likeliest(planned.ctx(), 0, std::min(kLogitRows, activations_->rows()));
    scratch_bytes = planned.scratch().peak_bytes();
    arena_bytes = planned.arena().used_bytes() + align_up(scratch_bytes);
  }
  runtime_ = std::make_unique<Runtime>(
      Runtime::Options{.device = o.device, .arena_bytes = arena_bytes, .scratch_bytes = scratch_bytes});
  build(*runtime_, o);
  if (o.begun && source_.config.train.lora)
    fail_usage("{}: it holds adapters (train.lora): triad export --format triad merges them first", o.checkpoint);
  if (o.begun)
    load_dense_weights(ctx(), model_->params(), source_.weights, static_cast<uint64_t>(config().train.seed));
  else
    load_model(ctx(), model_->params(), source_);
}

void LoadedModel::set_tokens(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
  const int64_t B = activations_->B();
  TRIAD_CHECK(static_cast<int64_t>(tokens.size()) == B * seq_len_, "{} tokens for a batch of {}", tokens.size(),
              B * seq_len_);
  for (const int32_t token : tokens)
    TRIAD_CHECK(token >= 0 && token < config().model.vocab_size, "token {} is outside of the vocabulary of {}", token,
                config().model.vocab_size);
  write(ctx(), activations_->tokens, layout_.cut(tokens, B, 0).data());
  if (!targets.empty()) write(ctx(), activations_->targets, layout_.cut(targets, B, -1).data());
  if (activations_->padding_begin.empty()) return;
  const std::vector<int32_t> no_padding(static_cast<size_t>(B), static_cast<int32_t>(seq_len_));
  write(ctx(), activations_->padding_begin, no_padding.data());
}

void LoadedModel::set_documents(std::span<const int32_t> bounds) {
  const int64_t B = activations_->B(), capacity = activations_->bounds.size(0);
  check_bounds(bounds, B, seq_len_, (capacity - 1) / B);
  std::vector<int32_t> padded = layout_.extend(bounds, B);
  padded.resize(static_cast<size_t>(capacity), padded.back());
  write(ctx(), activations_->bounds, padded.data());
}

std::vector<double> LoadedModel::logits(int64_t begin, int64_t n) { return logits(ctx(), begin, n); }

std::vector<double> LoadedModel::logits(Context& ctx, int64_t begin, int64_t n) {
  Scratch::Scope scope(ctx.scratch);
  const int64_t V = config().model.vocab_size, Vp = config().model.padded_vocab();
  const Tensor padded = scope.alloc(model_->dtype(), {n, Vp});
  model_->logits(ctx, *activations_, begin, padded);
  const std::vector<double> with_padding = read_floats(ctx, padded);
  std::vector<double> out;
  out.reserve(static_cast<size_t>(n * V));
  for (int64_t row = 0; row < n; ++row)
    out.insert(out.end(), with_padding.begin() + row * Vp, with_padding.begin() + row * Vp + V);
  return out;
}

double LoadedModel::row_loss(int64_t row, int32_t target) {
  Activations& act = *activations_;
  write(ctx(), act.targets.view({act.rows()}).slice(0, row, row + 1), &target);
  model_->loss(ctx(), act, row, row + 1);
  return read_floats(ctx(), act.row_loss.slice(0, row, row + 1)).at(0);
}

std::vector<int32_t> LoadedModel::likeliest(int64_t begin, int64_t n) { return likeliest(ctx(), begin, n); }

std::vector<int32_t> LoadedModel::likeliest(Context& ctx, int64_t begin, int64_t n) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor padded = scope.alloc(model_->dtype(), {n, config().model.padded_vocab()}),
               chosen = scope.alloc(DType::i32, {n});
  model_->logits(ctx, *activations_, begin, padded);
  argmax(ctx, chosen, padded, config().model.vocab_size);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  read(ctx, tokens.data(), chosen);
  return tokens;
}

std::vector<double> read_floats(Context& ctx, ConstTensor t) {
  std::vector<std::byte> raw(static_cast<size_t>(t.bytes()));
  read(ctx, raw.data(), t);
  std::vector<double> out(static_cast<size_t>(t.numel()));
  dispatch_float(t.dtype, [&]<class T>() {
    const T* from = reinterpret_cast<const T*>(raw.data());
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<double>(from[i]);
  });
  return out;
}

DType parse_dtype(const std::string& word) {
  constexpr std::pair<std::string_view, DType> kWords[] = {
      {"f64", DType::f64},  {"fp64", DType::f64},    {"float64", DType::f64}, {"f32", DType::f32},
      {"fp32", DType::f32}, {"float32", DType::f32}, {"bf16", DType::bf16},   {"bfloat16", DType::bf16}};
  for (const auto& [name, dtype] : kWords)
    if (word == name) return dtype;
  fail_usage("--dtype is \"{}\": f64, f32 (or fp32) or bf16 is allowed", shortened(word));
}

Device parse_device(const std::string& word, const LaunchEnv& launch) {
  for (const auto& [name, choice] : EnumWords<DeviceChoice>::words)
    if (word == name) return choose_device(choice, launch);
  fail_usage("--device is \"{}\": {} is allowed", word, all_words<DeviceChoice>());
}

}  // namespace triad
