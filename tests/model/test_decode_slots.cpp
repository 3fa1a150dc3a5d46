// Sequences that come and go in a batch: their bits do not depend on the others, and prompts packed into one pass start
// as each alone.
#include <cmath>
#include <map>

#include "model/decode_session.h"
#include "tests/support/decode_fixture.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int64_t kContext = 96;

std::vector<std::pair<const char*, ModelConfig>> all_kinds() {
  auto kinds = layer_variants(config_of(Phi::conv, GateKind::softmax, 6, 2));
  for (const Phi phi : {Phi::avg, Phi::mlp}) kinds.emplace_back("nsa", config_of(phi, GateKind::sigmoid, 6, 2));
  ModelConfig dense = config_of(Phi::avg, GateKind::softmax, 6, 2), shared_lists = kinds[2].second;
  dense.attention = AttentionKind::dense, dense.mlp = MlpKind::swiglu, dense.mlp_hidden = 24;
  shared_lists.nsa.every = 4;
  dense.resolve(), shared_lists.resolve();
  kinds.emplace_back("dense, swiglu", dense);
  kinds.emplace_back("a taught index, shared lists", shared_lists);
  return kinds;
}

// A sequence in a batch: in slot b it starts at step `from` with `prompt` tokens of its text, and `steps` more follow.
struct Stay {
  int64_t text, b, from, prompt, steps;
};

// By text: the logits after its prompt, and those of each step.
using Logits = std::map<int64_t, std::vector<std::vector<float>>>;

// Runs sequences in `batch` slots, which are idle before and after them.
Logits run(const ModelConfig& c, DType dtype, int64_t batch, const std::vector<Stay>& stays) {
  DecodeSession session(c,
                        {.device = Device::cpu(), .dtype = dtype, .batch = batch, .context = kContext, .starts = true});
  session.model().params().init(session.ctx(), 7);
  Logits logits;
  for (int64_t step = 0; step < 60; ++step) {
    std::vector<int32_t> tokens(static_cast<size_t>(batch), 0);
    std::vector<bool> has_text(static_cast<size_t>(batch), false);
    std::vector<std::vector<int32_t>> prompts;
    std::vector<DecodeSession::Start> starts;
    prompts.reserve(stays.size());
    for (const Stay& s : stays) {
      const std::vector<int32_t> text =
          DecodeFixture::random_tokens(static_cast<uint64_t>(s.text), kContext, c.vocab_size);
      if (step == s.from) {
        prompts.emplace_back(text.begin(), text.begin() + s.prompt);
        starts.push_back({s.b, prompts.back()});
      } else if (step > s.from && step <= s.from + s.steps) {
        has_text[static_cast<size_t>(s.b)] = true;
        tokens[static_cast<size_t>(s.b)] = text[static_cast<size_t>(s.prompt + step - s.from - 1)];
      }
    }
    std::vector<int64_t> idle;
    for (int64_t b = 0; b < batch; ++b)
      if (!has_text[static_cast<size_t>(b)]) idle.push_back(b);
    session.step_greedy(tokens, idle);
    if (!starts.empty()) session.start(starts);
    for (const Stay& s : stays)
      if (step >= s.from && step <= s.from + s.steps) logits[s.text].push_back(session.logits(s.b));
  }
  return logits;
}

}  // namespace

TEST_CASE("decode: on the CPU a sequence has the same bits alone and among others that come and go", "[decode]") {
  const Stay alone = {.text = 0, .b = 0, .from = 0, .prompt = 21, .steps = 40};
  Stay last = alone, late = alone;
  last.b = 2, late.b = 11, late.from = 7;
  const std::vector<Stay> few = {last,
                                 {.text = 1, .b = 0, .from = 0, .prompt = 50, .steps = 9},
                                 {.text = 2, .b = 0, .from = 12, .prompt = 1, .steps = 3},
                                 {.text = 3, .b = 1, .from = 5, .prompt = 33, .steps = 50},
                                 {.text = 4, .b = 0, .from = 20, .prompt = 70, .steps = 20}};
  std::vector<Stay> many = {late};
  for (int64_t b = 0; b < 11; ++b) many.push_back({.text = b + 1, .b = b, .from = b, .prompt = 3 + 5 * b, .steps = 20});
  for (const auto& [name, c] : all_kinds())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      INFO(name << ", " << name_of(dtype));
      const std::vector<std::vector<float>> expected = run(c, dtype, 1, {alone}).at(0);
      REQUIRE(expected.size() == 41);
      CHECK(run(c, dtype, 3, few).at(0) == expected);
      CHECK(run(c, dtype, 12, many).at(0) == expected);
    }
}

TEST_CASE("decode: prompts packed into one pass start as each alone", "[decode]") {
  constexpr int64_t kSteps = 12, kRow = 256;
  const std::vector<std::vector<int64_t>> all_begins = {{0, 64, 128, 192}, {0, 7, 41, 43}};
  const std::vector<int64_t> lengths = {5, 33, 1, 60};
  for (const auto& [name, c] : all_kinds())
    for (const std::vector<int64_t>& begins : all_begins) {
      DecodeFixture alone(c, 4, kRow, Device::cpu(), DType::f64), packed(c, 4, kRow, Device::cpu(), DType::f64, 0.3, 4);
      std::vector<std::vector<int32_t>> prompts, texts;
      for (size_t b = 0; b < lengths.size(); ++b) {
        texts.push_back(DecodeFixture::random_tokens(b, lengths[b] + kSteps, c.vocab_size));
        prompts.emplace_back(texts[b].begin(), texts[b].begin() + lengths[b]);
        alone.prefill(static_cast<int64_t>(b), prompts[b]);
      }
      packed.prefill_packed(prompts, begins);
      double largest = 0;
      for (int64_t step = 0; step <= kSteps; ++step) {
        for (int64_t b = 0; b < 4; ++b) {
          const std::vector<double> want = alone.logits(b), got = packed.logits(b);
          for (size_t i = 0; i < want.size(); ++i) largest = std::max(largest, std::abs(got[i] - want[i]));
          REQUIRE(std::isfinite(got[0]));
        }
        if (step == kSteps) break;
        std::vector<int32_t> next;
        for (size_t b = 0; b < lengths.size(); ++b) next.push_back(texts[b][static_cast<size_t>(lengths[b] + step)]);
        alone.step(next), packed.step(next);
      }
      INFO(name << ", from token " << begins[1] << " on: difference " << largest);
      CHECK(largest <= 1e-11);
    }
}
