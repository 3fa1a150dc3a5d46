// Cached decoding against the forward pass: equal logits at every position, after any prefill length; batches whose
// sequences differ in length; and how many keys a step reads. For the chosen tokens: test_decode_greedy.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tests/support/decode_fixture.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(difference / size);
}

// Prefills the first `prefilled` tokens, decodes the rest one by one, and returns the largest logit error from the last
// prefilled token on.
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
  // Lengths near where these end: first compressed block (8 tokens), second (12), sliding window (11), n_sel-th
  // selection block (32). After 309 tokens one is left to decode.
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
    for (auto [name, model] : layer_variants(config_of(phi, GateKind::softmax, 6, 2))) {
      check_agreement(model, Device::cpu(), DType::f64, 1e-12, {0, 33}, name);
      model.nsa.every = 4;  // a list for 4 tokens: after 33 tokens the cache's
      model.resolve();
      check_agreement(model, Device::cpu(), DType::f64, 1e-12, {0, 32, 33, 35}, fmt::format("{}, shared lists", name));
    }
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
  for (auto [name, model] : layer_variants(gpu_config(Phi::conv, GateKind::softmax, 6, 2, 64))) {
    check_agreement(model, Device::cuda(), DType::f32, 1e-5, {0, 70}, name, kGpuStd);
    model.nsa.every = 4;
    model.resolve();
    check_agreement(model, Device::cuda(), DType::f32, 1e-5, {0, 70}, fmt::format("{}, shared lists", name), kGpuStd);
  }
  dense.qkv_bias = dense.qk_norm = true;
  check_agreement(dense, Device::cuda(), DType::f32, 1e-5, {0, 70}, "dense, qkv_bias and qk_norm", kGpuStd);
  other.qkv_bias = other.qk_norm = true;
  check_agreement(other, Device::cuda(), DType::f32, 1e-5, {0, 47}, "qkv_bias and qk_norm", kGpuStd);
}

namespace {

// Prefills the sequences to these lengths, decodes 50 steps with all together, each with its own tokens, and compares
// with forward passes.
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
  check_ragged(gpu_config(Phi::mlp, GateKind::sigmoid, 2, 2, 64), Device::cuda(), {0, 5, 31, 32, 50, 90, 127, 200, 259},
               "mlp, sigmoid, G 1", kGpuStd);
  check_ragged(gpu_config(Phi::conv, GateKind::softmax, 16, 1, 128), Device::cuda(), {47, 130}, "conv, G 16", kGpuStd);
}

namespace {

// Compares how many keys a step reads with the formula. batches: sequence lengths after the step.
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
      const AttentionKind kind = c.attention_of(0);
      if (kind != AttentionKind::selected) expected[2] += each * (c.has_nsa() ? std::min(n.w, S) : S);
      if (kind == AttentionKind::nsa) expected[0] += each * compressed_length(S, n.l, n.d);
      if (!c.has_lists()) continue;
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
  ModelConfig index = c, window = c;
  index.nsa.selector = Selector::index, window.nsa.branches = Branches::window;
  ModelConfig one_softmax = index;
  one_softmax.nsa.branches = Branches::selected;
  for (ModelConfig* const each : {&index, &one_softmax, &window}) {
    each->resolve();
    check_reads(*each, device, dtype, {{1, 301}, {128, 77}, {129, 255}});
  }
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
