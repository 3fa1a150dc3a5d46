// Cached decoding chooses the tokens that forward passes choose, by a model that has learned a text by heart.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/graph.h"
#include "kernels/decode/argmax.h"
#include "tests/support/decode_fixture.h"
#include "tests/support/model_fixture.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// Continues a text by `count` tokens, each the most likely one by a forward pass over the whole text so far.
std::vector<int32_t> greedy_by_forward(DecodeFixture& f, std::vector<int32_t> text, size_t count) {
  const size_t prompt = text.size();
  while (text.size() < prompt + count) {
    const std::vector<double> logits = f.forward_last(text);
    text.push_back(static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt), text.end()};
}
// Continues one prompt per decoder sequence by the most likely tokens, with cached decoding. On the GPU the steps are a
// recorded graph, and the device chooses the token.
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
// Weights trained to reproduce a text, so that its two highest logits differ by more than rounding errors.
struct Learned {
  std::vector<float> weights;
  std::vector<int32_t> text;
};
Learned learn_by_heart(const ModelConfig& config, Device device) {
  constexpr int kMostSteps = 400;
  // Training ends at this loss; the right token then has about 99% probability.
  constexpr double kKnown = 0.01;
  constexpr float kRate = 4e-3f, kBeta1 = 0.9f, kBeta2 = 0.98f;
  ModelFixture f(config, 1, kTokens, device, DType::f32);
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

  // Other kernels serve several sequences, on a GPU others again more than 8 and more than 64.
  for (const int64_t B : device.is_cuda() ? std::vector<int64_t>{3, 12, 65} : std::vector<int64_t>{3}) {
    std::vector<size_t> lengths;
    std::vector<std::vector<int32_t>> prompts;
    for (int64_t b = 0; b < B; ++b) {
      lengths.push_back(kPrompt - 9 + static_cast<size_t>(b * 11 % 23));
      prompts.push_back(part(0, lengths.back()));
    }
    DecodeFixture batch(config, B, kTokens, device, dtype);
    batch.set_weights(learned.weights);
    const std::vector<std::vector<int32_t>> batch_tokens = greedy_by_steps(batch, prompts, kChosen);
    for (size_t b = 0; b < lengths.size(); ++b) {
      INFO("sequence " << b << " of " << B);
      CHECK(batch_tokens[b] == part(lengths[b], kChosen));
    }
  }
}

// Checks greedy tokens for both gate kinds; on a GPU also for several group sizes and 128-wide heads.
void check_greedy_of_phi(Phi phi, Device device) {
  for (const GateKind gate : {GateKind::softmax, GateKind::sigmoid})
    for (const auto& [heads, groups] : {std::pair<int64_t, int64_t>{2, 2}, {12, 2}, {16, 1}}) {
      if (!device.is_cuda() && heads != 12) continue;
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
