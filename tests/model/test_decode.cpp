// Cached decoding against the forward pass: equal logits at every position, after a prefill of any length; batches
// whose sequences differ in length; and the number of keys that a step reads.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "engine/graph.h"
#include "engine/rng.h"
#include "kernels/decode/argmax.h"
#include "model/decode.h"
#include "tests/support/model_fixture.h"
#include "tests/support/test.h"
#include "train/inference.h"

using namespace triad;
using triad::test::require_gpu;

namespace {

// A model of random weights, a decoder of B sequences, and the activations of a forward pass over one sequence of T
// tokens.
class DecodeFixture {
 public:
  DecodeFixture(const ModelConfig& config, int64_t B, int64_t T, Device device, DType dtype, double std = 0.3)
      : config_(config), B_(B), T_(T), dtype_(dtype) {
    int64_t arena = 0, scratch = 0;
    {
      Runtime plan({.device = device, .planning = true});
      build(plan);
      model_->forward(plan.ctx(), *act_);
      decoder_->prefill(plan.ctx(), *act_, 0, T);
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
  void set_weights(const std::vector<float>& stored) { model_->params().set(ctx(), stored); }

  static std::vector<int32_t> random_tokens(uint64_t stream, int64_t n, int64_t vocab) {
    std::vector<int32_t> tokens;
    const Philox random(5, stream);
    for (int64_t i = 0; i < n; ++i)
      tokens.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(i), static_cast<uint64_t>(vocab))));
    return tokens;
  }

  // Returns the logits of every row of a forward pass over these tokens, padded to T.
  std::vector<std::vector<double>> forward(std::vector<int32_t> tokens) {
    const size_t n = tokens.size();
    tokens.resize(static_cast<size_t>(T_), 0);
    write(ctx(), act_->tokens, tokens.data());
    model_->forward(ctx(), *act_);
    std::vector<std::vector<double>> rows;
    for (size_t i = 0; i < n; ++i) {
      model_->logits(ctx(), *act_, static_cast<int64_t>(i), one_row_);
      rows.push_back(used(read_floats(ctx(), one_row_), 0));
    }
    return rows;
  }
  std::vector<double> forward_last(std::vector<int32_t> tokens) {
    const int64_t n = static_cast<int64_t>(tokens.size());
    tokens.resize(static_cast<size_t>(T_), 0);
    write(ctx(), act_->tokens, tokens.data());
    model_->forward(ctx(), *act_);
    model_->logits(ctx(), *act_, n - 1, one_row_);
    return used(read_floats(ctx(), one_row_), 0);
  }
  void prefill(int64_t b, std::vector<int32_t> tokens) {
    const int64_t n = static_cast<int64_t>(tokens.size());
    if (n == 0) return decoder_->forget(ctx(), b);
    tokens.resize(static_cast<size_t>(T_), 0);
    write(ctx(), act_->tokens, tokens.data());
    decoder_->prefill(ctx(), *act_, b, n);
  }
  void step(const std::vector<int32_t>& tokens) {
    write(ctx(), decoder_->tokens, tokens.data());
    decoder_->step(ctx());
  }
  std::vector<double> logits(int64_t b) { return used(read_floats(ctx(), decoder_->logits), b); }

  Context& ctx() { return runtime_->ctx(); }
  Decoder& decoder() { return *decoder_; }
  Tensor reads() const { return reads_; }

 private:
  void build(Runtime& runtime) {
    model_ = std::make_unique<Model>(runtime.ctx(), runtime.arena(), config_,
                                     Model::Options{.dtype = dtype_, .training = false, .max_seq_len = T_});
    act_ = std::make_unique<Activations>(runtime.arena(), config_, 1, T_, dtype_, false);
    decoder_ = std::make_unique<Decoder>(runtime.ctx(), runtime.arena(), *model_, B_, T_);
    reads_ = runtime.arena().alloc(MemTag::io, "reads", DType::i64, {3});
    one_row_ = runtime.arena().alloc(MemTag::io, "a row of logits", dtype_, {1, config_.padded_vocab()});
  }
  std::vector<double> used(const std::vector<double>& padded, int64_t row) const {
    const auto begin = padded.begin() + row * config_.padded_vocab();
    return {begin, begin + config_.vocab_size};
  }

  ModelConfig config_;
  int64_t B_, T_;
  DType dtype_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Activations> act_;
  std::unique_ptr<Decoder> decoder_;
  Tensor one_row_, reads_;
};

double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(difference / size);
}

// A model of 2 layers. 310 tokens cross the boundaries of l, d, l_sel and w many times.
ModelConfig config_of(Phi phi, GateKind gate, int64_t heads, int64_t groups) {
  ModelConfig c = test::small_model();
  c.n_heads = heads, c.n_kv_groups = groups;
  c.nsa.phi = phi, c.nsa.gate.kind = gate;
  return c;
}
constexpr int64_t kTokens = 310;

// Prefills the first `prefilled` tokens, decodes the rest one by one, and returns the largest error of the logits from
// the last prefilled token on.
double largest_error(DecodeFixture& f, const std::vector<int32_t>& tokens,
                     const std::vector<std::vector<double>>& reference, int64_t prefilled) {
  f.prefill(0, {tokens.begin(), tokens.begin() + prefilled});
  double largest = 0;
  if (prefilled > 0) largest = relative_error(f.logits(0), reference[static_cast<size_t>(prefilled - 1)]);
  for (size_t t = static_cast<size_t>(prefilled); t < tokens.size(); ++t) {
    f.step({tokens[t]});
    const double error = relative_error(f.logits(0), reference[t]);
    largest = std::isfinite(error) ? std::max(largest, error) : error;
    if (!std::isfinite(error)) break;
  }
  return largest;
}

// Models whose layers or branches differ from those of c; of three layers, so that the kinds alternate.
std::vector<std::pair<const char*, ModelConfig>> layer_variants(ModelConfig c) {
  c.n_layers = 3, c.rope_original_len = 64;
  ModelConfig mixed = c, shared = c;
  mixed.dense_layers = "0:1,2:3", mixed.rope_scaling = RopeScaling::yarn;
  shared.dense_layers = "1:2", shared.nsa.shared_kv = true, shared.rope_scaling = RopeScaling::llama3;
  mixed.resolve(), shared.resolve();
  return {{"mixed layers, yarn", mixed}, {"shared k and v, mixed layers, llama3", shared}};
}

void check_agreement(const ModelConfig& config, Device device, DType dtype, double tolerance,
                     std::initializer_list<int64_t> prefills, const std::string& name, double std = 0.3) {
  DecodeFixture f(config, 1, kTokens, device, dtype, std);
  const std::vector<int32_t> tokens = DecodeFixture::random_tokens(0, kTokens, config.vocab_size);
  const auto reference = f.forward(tokens);
  for (const int64_t prefilled : prefills) {
    const double error = largest_error(f, tokens, reference, prefilled);
    INFO(name << ", " << prefilled << " tokens prefilled: relative error " << error);
    CHECK(error <= tolerance);
  }
}

// On the GPU a decoding step adds in another order than a forward pass. The weights are small, so that scores stay
// small and rounding differences do not grow in the softmax.
constexpr double kGpuStd = 0.08;

// Returns a config whose shape the GPU's fused kernels support.
ModelConfig gpu_config(Phi phi, GateKind gate, int64_t heads, int64_t groups, int64_t width) {
  ModelConfig c = config_of(phi, gate, heads, groups);
  c.dim = 128, c.d_k = c.d_v = width, c.vocab_size = 307, c.mlp_hidden = 256;
  c.nsa.l = 32, c.nsa.d = 16, c.nsa.l_sel = 32, c.nsa.n_sel = 4, c.nsa.w = 50;
  return c;
}

// Continues a text by `count` tokens, each the most likely one by a forward pass over the whole text so far.
std::vector<int32_t> greedy_by_forward(DecodeFixture& f, std::vector<int32_t> text, size_t count) {
  const size_t prompt = text.size();
  while (text.size() < prompt + count) {
    const std::vector<double> logits = f.forward_last(text);
    text.push_back(static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt), text.end()};
}
// Continues one prompt for each sequence of the decoder by the most likely tokens, with cached decoding. On the GPU the
// steps are a recorded graph, and the device chooses the token.
std::vector<std::vector<int32_t>> greedy_by_steps(DecodeFixture& f, const std::vector<std::vector<int32_t>>& prompts,
                                                  size_t count) {
  for (size_t b = 0; b < prompts.size(); ++b) f.prefill(static_cast<int64_t>(b), prompts[b]);
  Decoder& d = f.decoder();
  Graph graph(f.ctx().device);
  std::vector<std::vector<int32_t>> chosen(prompts.size());
  d.choose_greedy(f.ctx());
  while (true) {
    std::vector<int32_t> tokens(prompts.size());
    read(f.ctx(), tokens.data(), d.tokens);
    for (size_t b = 0; b < tokens.size(); ++b) chosen[b].push_back(tokens[b]);
    if (chosen[0].size() == count) return chosen;
    const auto work = [&] {
      d.queue(f.ctx());
      d.choose_greedy(f.ctx());
    };
    if (!f.ctx().device.is_cuda() || chosen[0].size() < 3) {
      work();
    } else {
      if (!graph.recorded()) graph.record(f.ctx(), work);
      graph.launch(f.ctx().stream);
    }
    d.stepped();
  }
}
// The weights of a model trained to reproduce a text, so that its two highest logits differ by more than rounding
// errors.
struct Learned {
  std::vector<float> weights;
  std::vector<int32_t> text;
};
Learned learn_by_heart(const ModelConfig& config, Device device) {
  constexpr int kMostSteps = 400;
  // Training ends at this loss; the right token then has a probability of about 99%.
  constexpr double kKnown = 0.01;
  constexpr float kRate = 4e-3f, kBeta1 = 0.9f, kBeta2 = 0.98f;
  test::ModelFixture f(config, 1, kTokens, device, DType::f32);
  Params& params = f.model().params();
  std::vector<float>& w = f.parameters();
  std::vector<float> m(w.size(), 0.0f), v(w.size(), 0.0f);
  for (int64_t i = 0; i < params.count(); ++i)
    for (int64_t j = 0; j < params.specs()[i].shape.numel(); ++j) {
      float& x = w[static_cast<size_t>(params.offset(i) + j)];  // drawn from N(0, 0.1)
      x = (params.specs()[i].init == ParamSpec::Init::constant ? static_cast<float>(params.specs()[i].value) : 0) +
          x / 2;
    }
  for (int step = 1;; ++step) {
    f.upload();
    const double loss = f.loss_and_grads();
    if (loss < kKnown) break;
    INFO("step " << step << ", loss " << loss);
    REQUIRE(step < kMostSteps);
    for (int64_t i = 0; i < params.count(); ++i) {
      const std::vector<double> grad = f.grad(i);
      for (size_t j = 0; j < grad.size(); ++j) {
        const size_t at = static_cast<size_t>(params.offset(i)) + j;
        const float g = static_cast<float>(grad[j]);
        m[at] = kBeta1 * m[at] + (1 - kBeta1) * g;
        v[at] = kBeta2 * v[at] + (1 - kBeta2) * g * g;
        const float unbiased = v[at] / (1 - std::pow(kBeta2, static_cast<float>(step)));
        w[at] -= kRate * m[at] / (1 - std::pow(kBeta1, static_cast<float>(step))) / (std::sqrt(unbiased) + 1e-8f);
      }
    }
  }
  Learned learned{w, std::vector<int32_t>(kTokens)};
  read(f.ctx(), learned.text.data(), f.activations().tokens);
  return learned;
}

void check_greedy(const ModelConfig& config, Device device, DType dtype, const std::string& name) {
  constexpr size_t kPrompt = 40, kChosen = 256;
  const Learned learned = learn_by_heart(config, device);
  DecodeFixture f(config, 1, kTokens, device, dtype);
  f.set_weights(learned.weights);
  const auto part = [&](size_t from, size_t count) {
    const auto begin = learned.text.begin() + static_cast<std::ptrdiff_t>(from);
    return std::vector<int32_t>(begin, begin + static_cast<std::ptrdiff_t>(count));
  };
  const std::vector<int32_t> prompt = part(0, kPrompt), by_steps = greedy_by_steps(f, {prompt}, kChosen)[0];
  INFO(name);
  CHECK(by_steps == greedy_by_forward(f, prompt, kChosen));
  // The model reproduces the text, for which it must use more than the previous token.
  CHECK(by_steps == part(kPrompt, kChosen));

  // A batch of several sequences runs on other kernels than one sequence.
  const std::vector<size_t> lengths = {kPrompt, kPrompt + 13, kPrompt - 9};
  std::vector<std::vector<int32_t>> prompts;
  for (const size_t n : lengths) prompts.push_back(part(0, n));
  DecodeFixture batch(config, static_cast<int64_t>(lengths.size()), kTokens, device, dtype);
  batch.set_weights(learned.weights);
  const std::vector<std::vector<int32_t>> of_batch = greedy_by_steps(batch, prompts, kChosen);
  for (size_t b = 0; b < lengths.size(); ++b) {
    INFO("sequence " << b << " of a batch");
    CHECK(of_batch[b] == part(lengths[b], kChosen));
  }
}

}  // namespace

TEST_CASE("decode: steps give the forward pass's logits at every position", "[decode]") {
  for (const Phi phi : {Phi::avg, Phi::conv, Phi::mlp})
    for (const GateKind gate : {GateKind::softmax, GateKind::sigmoid})
      for (const auto& [heads, groups] : {std::pair<int64_t, int64_t>{2, 2}, {12, 2}, {16, 1}}) {
        const std::string name = fmt::format("phi {}, gate {}, G {}", word_of(phi), word_of(gate), heads / groups);
        check_agreement(config_of(phi, gate, heads, groups), Device::cpu(), DType::f32, 1e-5, {0, 10}, name);
      }
}

TEST_CASE("decode: after a prefill of any length, steps give the forward pass's logits", "[decode]") {
  // Lengths near the ends of the first compressed block (8 tokens), of the second (12), of the window (11) and of the
  // n_sel-th selection block (32). After 309 tokens one is left to decode.
  const auto prefills = {1, 7, 8, 12, 10, 11, 31, 32, 33, 200, 309};
  const ModelConfig c = config_of(Phi::conv, GateKind::softmax, 6, 2);
  for (const int64_t n : prefills) check_agreement(c, Device::cpu(), DType::f64, 1e-12, {n}, "f64");
  ModelConfig swiglu = c;
  swiglu.mlp = MlpKind::swiglu, swiglu.mlp_hidden = 24, swiglu.tie_embeddings = true;
  check_agreement(swiglu, Device::cpu(), DType::f32, 1e-5, {40}, "swiglu, tied");
  ModelConfig wide_window = c;
  wide_window.nsa.w = 1000;
  check_agreement(wide_window, Device::cpu(), DType::f32, 1e-5, {0, 100}, "a window longer than the cache");
  ModelConfig dense = c;
  dense.attention = AttentionKind::dense;
  check_agreement(dense, Device::cpu(), DType::f32, 1e-5, {0, 1, 100}, "dense");
  for (const AttentionKind kind : {AttentionKind::nsa, AttentionKind::dense}) {
    ModelConfig qkv = c;
    qkv.attention = kind, qkv.qkv_bias = qkv.qk_norm = true;
    check_agreement(qkv, Device::cpu(), DType::f64, 1e-12, {0, 1, 33}, "qkv_bias and qk_norm");
    qkv.qk_norm = false;
    check_agreement(qkv, Device::cpu(), DType::f32, 1e-5, {10}, "qkv_bias");
  }
  ModelConfig scaled = c;
  scaled.rope_scale = 3.5;
  check_agreement(scaled, Device::cpu(), DType::f32, 1e-5, {0, 33}, "rope_scale");
  for (const Phi phi : {Phi::avg, Phi::conv, Phi::mlp})
    for (const auto& [name, model] : layer_variants(config_of(phi, GateKind::softmax, 6, 2)))
      check_agreement(model, Device::cpu(), DType::f64, 1e-12, {0, 33}, name);
}

namespace {

// Checks the greedy tokens for both kinds of gate and several group sizes, on the CPU with phi avg only; on a GPU also
// for heads of dimension 128.
void check_greedy_of_phi(Phi phi, Device device) {
  for (const GateKind gate : {GateKind::softmax, GateKind::sigmoid})
    for (const auto& [heads, groups] : {std::pair<int64_t, int64_t>{2, 2}, {12, 2}, {16, 1}}) {
      if (!device.is_cuda() && phi != Phi::avg && heads != 12) continue;
      const bool wide = gate == GateKind::sigmoid && groups == 2;
      check_greedy(device.is_cuda() ? gpu_config(phi, gate, heads, groups, wide ? 128 : 64)
                                    : config_of(phi, gate, heads, groups),
                   device, DType::bf16,
                   fmt::format("phi {}, gate {}, G {}", word_of(phi), word_of(gate), heads / groups));
    }
}

}  // namespace

TEST_CASE("decode: in bf16 steps choose the same 256 tokens as forward passes, phi avg", "[decode]") {
  check_greedy_of_phi(Phi::avg, Device::cpu());
}
TEST_CASE("decode: in bf16 steps choose the same 256 tokens as forward passes, phi conv", "[decode]") {
  check_greedy_of_phi(Phi::conv, Device::cpu());
}
TEST_CASE("decode: in bf16 steps choose the same 256 tokens as forward passes, phi mlp", "[decode]") {
  check_greedy_of_phi(Phi::mlp, Device::cpu());
}

TEST_CASE("decode: on the GPU steps give the forward pass's logits", "[decode][gpu]") {
  if (!require_gpu()) return;
  for (const Phi phi : {Phi::avg, Phi::conv, Phi::mlp})
    for (const auto& [heads, groups] : {std::pair<int64_t, int64_t>{2, 2}, {12, 2}, {16, 1}})
      for (const GateKind gate : {GateKind::softmax, GateKind::sigmoid}) {
        const std::string name = fmt::format("phi {}, gate {}, G {}", word_of(phi), word_of(gate), heads / groups);
        check_agreement(gpu_config(phi, gate, heads, groups, 64), Device::cuda(), DType::f32, 1e-5, {0, 70}, name,
                        kGpuStd);
      }
  check_agreement(config_of(Phi::conv, GateKind::softmax, 6, 2), Device::cuda(), DType::f32, 1e-5, {0}, "odd widths",
                  kGpuStd);
  ModelConfig other = gpu_config(Phi::conv, GateKind::sigmoid, 6, 2, 64);
  other.mlp = MlpKind::swiglu, other.tie_embeddings = true, other.rope_scale = 3.5;
  check_agreement(other, Device::cuda(), DType::f32, 1e-5, {1, 31, 47, 50, 128, 309}, "swiglu, tied, rope_scale",
                  kGpuStd);
  ModelConfig dense = gpu_config(Phi::avg, GateKind::softmax, 6, 2, 128);
  dense.attention = AttentionKind::dense, dense.mlp = MlpKind::swiglu;
  check_agreement(dense, Device::cuda(), DType::f32, 1e-5, {0, 70}, "dense, swiglu", kGpuStd);
  for (const auto& [name, model] : layer_variants(gpu_config(Phi::conv, GateKind::softmax, 6, 2, 64)))
    check_agreement(model, Device::cuda(), DType::f32, 1e-5, {0, 70}, name, kGpuStd);
  dense.qkv_bias = dense.qk_norm = true;
  check_agreement(dense, Device::cuda(), DType::f32, 1e-5, {0, 70}, "dense, qkv_bias and qk_norm", kGpuStd);
  other.qkv_bias = other.qk_norm = true;
  check_agreement(other, Device::cuda(), DType::f32, 1e-5, {0, 47}, "qkv_bias and qk_norm", kGpuStd);
}

TEST_CASE("decode: on the GPU in bf16 steps choose the same 256 tokens as forward passes, phi avg", "[decode][gpu]") {
  if (require_gpu()) check_greedy_of_phi(Phi::avg, Device::cuda());
}
TEST_CASE("decode: on the GPU in bf16 steps choose the same 256 tokens as forward passes, phi conv", "[decode][gpu]") {
  if (require_gpu()) check_greedy_of_phi(Phi::conv, Device::cuda());
}
TEST_CASE("decode: on the GPU in bf16 steps choose the same 256 tokens as forward passes, phi mlp", "[decode][gpu]") {
  if (require_gpu()) check_greedy_of_phi(Phi::mlp, Device::cuda());
}
TEST_CASE("decode: on the GPU in bf16 steps choose the same 256 tokens as forward passes, dense", "[decode][gpu]") {
  if (!require_gpu()) return;
  ModelConfig dense = gpu_config(Phi::avg, GateKind::softmax, 6, 2, 128);
  dense.attention = AttentionKind::dense, dense.mlp = MlpKind::swiglu;
  check_greedy(dense, Device::cuda(), DType::bf16, "dense, swiglu");
  dense.qkv_bias = dense.qk_norm = true;
  check_greedy(dense, Device::cuda(), DType::bf16, "dense, swiglu, qkv_bias and qk_norm");
}

namespace {

// Prefills the sequences to these lengths, decodes 50 steps of all of them together, each sequence with its own tokens,
// and compares with forward passes.
void check_ragged(const ModelConfig& c, Device device, const std::vector<int64_t>& lengths, const std::string& name,
                  double std = 0.3) {
  constexpr int64_t kSteps = 50;
  DecodeFixture f(c, static_cast<int64_t>(lengths.size()), kTokens, device, DType::f32, std);
  std::vector<std::vector<int32_t>> texts;
  std::vector<std::vector<std::vector<double>>> references;
  for (size_t b = 0; b < lengths.size(); ++b) {
    texts.push_back(DecodeFixture::random_tokens(b, lengths[b] + kSteps, c.vocab_size));
    references.push_back(f.forward(texts[b]));
  }
  for (size_t b = 0; b < lengths.size(); ++b)
    f.prefill(static_cast<int64_t>(b), {texts[b].begin(), texts[b].begin() + lengths[b]});
  double largest = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    std::vector<int32_t> tokens;
    for (size_t b = 0; b < lengths.size(); ++b) tokens.push_back(texts[b][static_cast<size_t>(lengths[b] + step)]);
    f.step(tokens);
    for (size_t b = 0; b < lengths.size(); ++b) {
      const double error =
          relative_error(f.logits(static_cast<int64_t>(b)), references[b][static_cast<size_t>(lengths[b] + step)]);
      largest = std::isfinite(error) ? std::max(largest, error) : 1 / 0.0;
    }
  }
  INFO(name << ", " << lengths.size() << " sequences: relative error " << largest);
  CHECK(largest <= 1e-5);
}

}  // namespace

TEST_CASE("decode: sequences of a batch may differ in length", "[decode]") {
  check_ragged(config_of(Phi::avg, GateKind::softmax, 6, 2), Device::cpu(), {0, 5, 33, 200}, "avg");
  check_ragged(config_of(Phi::mlp, GateKind::sigmoid, 2, 2), Device::cpu(), {12, 0, 7}, "mlp, sigmoid");
  ModelConfig qkv = config_of(Phi::conv, GateKind::softmax, 6, 2);
  qkv.qkv_bias = qkv.qk_norm = true;
  check_ragged(qkv, Device::cpu(), {3, 0, 41}, "qkv_bias and qk_norm");
}

TEST_CASE("decode: sequences of a batch on the GPU may differ in length", "[decode][gpu]") {
  if (!require_gpu()) return;
  check_ragged(gpu_config(Phi::avg, GateKind::softmax, 12, 2, 64), Device::cuda(), {0, 31, 129, 260}, "G 6", kGpuStd);
  // A batch of 9 sequences has more rows than the kernels for small batches support.
  check_ragged(gpu_config(Phi::mlp, GateKind::sigmoid, 2, 2, 64), Device::cuda(), {0, 5, 31, 32, 50, 90, 127, 200, 259},
               "mlp, sigmoid, G 1", kGpuStd);
  check_ragged(gpu_config(Phi::conv, GateKind::softmax, 16, 1, 128), Device::cuda(), {47, 130}, "conv, G 16", kGpuStd);
}

namespace {

// Compares the number of keys that a step reads with the formula. batches: the lengths of the sequences after the step.
void check_reads(const ModelConfig& c, Device device, DType dtype, const std::vector<std::vector<int64_t>>& batches) {
  const NsaConfig& n = c.nsa;
  const int64_t B = static_cast<int64_t>(batches[0].size());
  DecodeFixture f(c, B, kTokens, device, dtype);
  const std::vector<int32_t> tokens = DecodeFixture::random_tokens(2, kTokens, c.vocab_size);
  for (const std::vector<int64_t>& lengths : batches) {
    std::array<int64_t, 3> expected{};
    for (int64_t b = 0; b < B; ++b) {
      const int64_t S = lengths[static_cast<size_t>(b)], each = c.n_layers * c.n_kv_groups;
      f.prefill(b, {tokens.begin(), tokens.begin() + S - 1});
      expected[2] += each * (c.has_nsa() ? std::min(n.w, S) : S);
      if (!c.has_nsa()) continue;
      expected[0] += each * compressed_length(S, n.l, n.d);
      expected[1] += each * (S >= n.n_sel * n.l_sel ? (n.n_sel - 1) * n.l_sel + (S - 1) % n.l_sel + 1 : S);
    }
    const Tensor reads = f.reads();
    zero(f.ctx(), reads);
    write(f.ctx(), f.decoder().tokens, tokens.data());
    f.decoder().queue(f.ctx(), {.reads = reads});
    f.decoder().stepped();
    std::array<int64_t, 3> counted{};
    read(f.ctx(), counted.data(), reads);
    INFO(B << " sequences, of the first the token that makes " << lengths[0] << ", on " << device.str());
    CHECK(counted == expected);
  }
}

void check_reads_of_all(Device device, DType dtype, int64_t heads, int64_t groups) {
  const ModelConfig c = gpu_config(Phi::avg, GateKind::softmax, heads, groups, 64);
  check_reads(c, device, dtype,
              {{1}, {31}, {32}, {33}, {127}, {128}, {129}, {143}, {144}, {160}, {161}, {255}, {256}, {300}, {301}});
  check_reads(c, device, dtype, {{1, 301, 128}, {127, 129, 50}, {309, 33, 161}});
  ModelConfig dense = c;
  dense.attention = AttentionKind::dense;
  check_reads(dense, device, dtype, {{1, 301}, {128, 77}});
}

}  // namespace

TEST_CASE("decode: a step reads the expected number of keys", "[decode]") {
  check_reads_of_all(Device::cpu(), DType::f32, 12, 2);
}
TEST_CASE("decode: a step on the GPU reads the expected number of keys", "[decode][gpu]") {
  if (!require_gpu()) return;
  for (const auto& [heads, groups] : {std::pair<int64_t, int64_t>{2, 2}, {12, 2}, {16, 1}})
    check_reads_of_all(Device::cuda(), DType::bf16, heads, groups);
}
