#include "tests/support/decode_fixture.h"

#include <algorithm>

#include "engine/rng.h"
#include "tests/support/model_fixture.h"
#include "train/inference.h"

namespace triad::test {

ModelConfig config_of(Phi phi, GateKind gate, int64_t heads, int64_t groups) {
  ModelConfig c = small_model();
  c.n_heads = heads, c.n_kv_groups = groups;
  c.nsa.phi = phi, c.nsa.gate.kind = gate;
  return c;
}

ModelConfig gpu_config(Phi phi, GateKind gate, int64_t heads, int64_t groups, int64_t width) {
  ModelConfig c = config_of(phi, gate, heads, groups);
  c.dim = 128, c.d_k = c.d_v = width, c.vocab_size = 307, c.mlp_hidden = 256;
  c.nsa.l = 32, c.nsa.d = 16, c.nsa.l_sel = 32, c.nsa.n_sel = 4, c.nsa.w = 50;
  return c;
}

std::vector<std::pair<const char*, ModelConfig>> layer_variants(ModelConfig c) {
  c.n_layers = 3, c.rope_original_len = 64;
  ModelConfig mixed = c, shared = c;
  mixed.dense_layers = "0:1,2:3", mixed.rope_scaling = RopeScaling::yarn;
  shared.dense_layers = "1:2", shared.nsa.shared_kv = true, shared.rope_scaling = RopeScaling::llama3;
  ModelConfig index = c, one_softmax = mixed;
  index.nsa.selector = one_softmax.nsa.selector = Selector::index;
  index.nsa.d_index = 10, index.qk_norm = true, index.nope_layers = "1:2";
  one_softmax.nsa.branches = Branches::selected, one_softmax.nsa.init_blocks = 0, one_softmax.nsa.local_blocks = 1;
  one_softmax.nsa.gate = {};
  ModelConfig layers = c;
  layers.n_layers = 4, layers.qk_norm = true, layers.nsa.layers = layered_model().nsa.layers;
  layers.nsa.layers[1].w = 40;
  layers.nope_layers = "0:1,3:4";
  layers.resolve();
  for (ModelConfig* each : {&mixed, &shared, &index, &one_softmax}) each->resolve();
  return {{"mixed layers, yarn", mixed},
          {"shared k and v, mixed layers, llama3", shared},
          {"a taught index, qk_norm, a layer without rotation", index},
          {"one softmax, mixed layers, yarn", one_softmax},
          {"nsa.layers, qk_norm, layers without rotation", layers}};
}

DecodeFixture::DecodeFixture(const ModelConfig& config, int64_t B, int64_t T, Device device, DType dtype, double std,
                             int64_t most_documents)
    : config_(config), B_(B), T_(T), most_documents_(most_documents), dtype_(dtype) {
  int64_t arena = 0, scratch = 0;
  {
    Runtime plan({.device = device, .planning = true});
    build(plan);
    model_->forward(plan.ctx(), *act_);
    const Decoder::Prompt prompt = {0, 0, T};
    decoder_->prefill(plan.ctx(), *act_, {&prompt, 1});
    decoder_->step(plan.ctx());
    scratch = plan.scratch().peak_bytes();
    arena = plan.arena().used_bytes() + align_up(scratch);
  }
  runtime_ =
      std::make_unique<Runtime>(Runtime::Options{.device = device, .arena_bytes = arena, .scratch_bytes = scratch});
  build(*runtime_);
  Params& params = model_->params();
  std::vector<float> host(static_cast<size_t>(params.stored_elements()), 0.0f);
  for (int64_t i = 0; i < params.count(); ++i) {
    const Philox random(3, static_cast<uint64_t>(i));
    const ParamSpec& p = params.specs()[i];
    for (int64_t j = 0; j < p.shape.numel(); ++j)
      host[static_cast<size_t>(params.offset(i) + j)] =
          static_cast<float>((p.decays() ? 0 : 1) + std * random.normal(static_cast<uint64_t>(j)));
  }
  params.set(ctx(), host);
}

void DecodeFixture::build(Runtime& runtime) {
  model_ = std::make_unique<Model>(runtime.ctx(), runtime.arena(), config_,
                                   Model::Options{.dtype = dtype_, .training = false, .max_seq_len = T_});
  act_ =
      std::make_unique<Activations>(runtime.arena(), config_, 1, T_, dtype_, false, RecomputePlan(), most_documents_);
  decoder_ = std::make_unique<Decoder>(runtime.ctx(), runtime.arena(), *model_, B_, T_);
  reads_ = runtime.arena().alloc(MemTag::io, "reads", DType::i64, {3});
  one_row_ = runtime.arena().alloc(MemTag::io, "a row of logits", dtype_, {1, config_.padded_vocab()});
}

std::vector<int32_t> DecodeFixture::random_tokens(uint64_t stream, int64_t n, int64_t vocab) {
  std::vector<int32_t> tokens;
  const Philox random(5, stream);
  for (int64_t i = 0; i < n; ++i)
    tokens.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(i), static_cast<uint64_t>(vocab))));
  return tokens;
}

void DecodeFixture::run(std::vector<int32_t> tokens) {
  tokens.resize(static_cast<size_t>(T_), 0);
  write(ctx(), act_->tokens, tokens.data());
  model_->forward(ctx(), *act_);
}

std::vector<double> DecodeFixture::row(int64_t i) {
  model_->logits(ctx(), *act_, i, one_row_);
  return used(read_floats(ctx(), one_row_), 0);
}

std::vector<std::vector<double>> DecodeFixture::forward(const std::vector<int32_t>& tokens) {
  run(tokens);
  std::vector<std::vector<double>> rows;
  for (size_t i = 0; i < tokens.size(); ++i) rows.push_back(row(static_cast<int64_t>(i)));
  return rows;
}

std::vector<double> DecodeFixture::forward_last(const std::vector<int32_t>& tokens) {
  run(tokens);
  return row(static_cast<int64_t>(tokens.size()) - 1);
}

void DecodeFixture::prefill(int64_t b, std::vector<int32_t> tokens) {
  const int64_t n = static_cast<int64_t>(tokens.size());
  if (n == 0) return decoder_->forget(ctx(), {&b, 1});
  tokens.resize(static_cast<size_t>(T_), 0);
  write(ctx(), act_->tokens, tokens.data());
  const Decoder::Prompt prompt = {b, 0, n};
  decoder_->prefill(ctx(), *act_, {&prompt, 1});
}

void DecodeFixture::prefill_packed(const std::vector<std::vector<int32_t>>& texts, const std::vector<int64_t>& begins) {
  std::vector<int32_t> row(static_cast<size_t>(T_), 0), bounds(begins.begin(), begins.end());
  std::vector<Decoder::Prompt> prompts;
  for (size_t b = 0; b < texts.size(); ++b) {
    std::copy(texts[b].begin(), texts[b].end(), row.begin() + begins[b]);
    prompts.push_back({static_cast<int64_t>(b), begins[b], static_cast<int64_t>(texts[b].size())});
  }
  bounds.resize(static_cast<size_t>(act_->bounds.size(0)), static_cast<int32_t>(T_));
  write(ctx(), act_->tokens, row.data());
  write(ctx(), act_->bounds, bounds.data());
  decoder_->prefill(ctx(), *act_, prompts);
}

void DecodeFixture::step(const std::vector<int32_t>& tokens) {
  write(ctx(), decoder_->tokens, tokens.data());
  decoder_->step(ctx());
}

std::vector<double> DecodeFixture::logits(int64_t b) { return used(read_floats(ctx(), decoder_->logits), b); }

std::vector<double> DecodeFixture::used(const std::vector<double>& padded, int64_t row) const {
  const auto begin = padded.begin() + row * config_.padded_vocab();
  return {begin, begin + config_.vocab_size};
}

}  // namespace triad::test
