// Sequences that come and go in a batch: their bits do not depend on the others, and prompts packed into one pass start
// as each alone.
#include <algorithm>
#include <cmath>
#include <map>

#include "engine/op_scope.h"
#include "model/decoding/decode_session.h"
#include "tests/support/decode_fixture.h"
#include "tests/support/skip.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int64_t kContext = 96;

std::vector<std::pair<const char*, ModelConfig>> all_kinds(Device device = Device::cpu()) {
  const auto config = [&](Phi phi, GateKind gate) {
    return device.is_cuda() ? gpu_config(phi, gate, 6, 2, 64) : config_of(phi, gate, 6, 2);
  };
  auto kinds = layer_variants(config(Phi::conv, GateKind::softmax));
  for (const Phi phi : {Phi::avg, Phi::mlp}) kinds.emplace_back("nsa", config(phi, GateKind::sigmoid));
  ModelConfig dense = config(Phi::avg, GateKind::softmax), shared_lists = kinds[2].second;
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
Logits run(const ModelConfig& c, DType dtype, int64_t batch, const std::vector<Stay>& stays,
           Device device = Device::cpu()) {
  DecodeSession session(c, {.device = device, .dtype = dtype, .batch = batch, .context = kContext, .starts = true});
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

namespace {

const Stay kAlone = {.text = 0, .b = 0, .from = 0, .prompt = 21, .steps = 40};

// The sequence kAlone in slot 2 of 3, and others in the other slots.
std::vector<Stay> among_few() {
  Stay last = kAlone;
  last.b = 2;
  return {last,
          {.text = 1, .b = 0, .from = 0, .prompt = 50, .steps = 9},
          {.text = 2, .b = 0, .from = 12, .prompt = 1, .steps = 3},
          {.text = 3, .b = 1, .from = 5, .prompt = 33, .steps = 50},
          {.text = 4, .b = 0, .from = 20, .prompt = 70, .steps = 20}};
}

// In the last slot, where it begins later than others.
std::vector<Stay> among_many(int64_t batch = 12) {
  Stay late = kAlone;
  late.b = batch - 1, late.from = 7;
  std::vector<Stay> all = {late};
  for (int64_t b = 0; b + 1 < batch; ++b)
    all.push_back({.text = b + 1, .b = b, .from = b % 11, .prompt = 3 + 5 * (b % 11), .steps = 20});
  return all;
}

}  // namespace

TEST_CASE("decode: on the CPU a sequence has the same bits alone and among others that come and go", "[decode]") {
  for (const auto& [name, c] : all_kinds())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      INFO(name << ", " << name_of(dtype));
      const std::vector<std::vector<float>> expected = run(c, dtype, 1, {kAlone}).at(0);
      REQUIRE(expected.size() == 41);
      CHECK(run(c, dtype, 3, among_few()).at(0) == expected);
      CHECK(run(c, dtype, 12, among_many()).at(0) == expected);
    }
}

TEST_CASE("decode: on the GPU a sequence has the same bits in a batch, whoever else is in it, and close ones in others",
          "[decode][gpu]") {
  if (!require_gpu()) return;
  const Device gpu = Device::cuda();
  for (const auto& [name, c] : all_kinds(gpu)) {
    const Logits one = run(c, DType::bf16, 1, {kAlone}, gpu), three = run(c, DType::bf16, 3, {kAlone}, gpu),
                 twelve = run(c, DType::bf16, 12, {kAlone}, gpu);
    INFO(name);
    CHECK(run(c, DType::bf16, 3, among_few(), gpu).at(0) == three.at(0));
    CHECK(run(c, DType::bf16, 12, among_many(), gpu).at(0) == twelve.at(0));
    // Other kernels compute other batches: the likeliest token may differ where two logits are about equal in bf16.
    constexpr float kClose = 0x1p-8f;
    for (const Logits* const other : {&three, &twelve})
      for (size_t i = 0; i < one.at(0).size(); ++i) {
        const std::vector<float>&want = one.at(0)[i], &got = other->at(0)[i];
        const auto likeliest = [](const std::vector<float>& row) {
          return static_cast<size_t>(std::max_element(row.begin(), row.end()) - row.begin());
        };
        const size_t a = likeliest(want), b = likeliest(got);
        if (a != b) CHECK(want[a] - want[b] <= kClose * std::max(1.0f, std::abs(want[a])));
      }
  }
}

TEST_CASE("decode: on the GPU a sequence has the same bits among 9 to 64 sequences, and among 65 whoever they are",
          "[decode][gpu]") {
  if (!require_gpu()) return;
  const Device gpu = Device::cuda();
  Runtime card({.device = gpu, .planning = true});
  for (const auto& [name, c] : all_kinds(gpu)) {
    INFO(name);
    const auto in_batch = [&, &kind = c](int64_t batch, const std::vector<Stay>& stays) {
      return run(kind, DType::bf16, batch, stays, gpu).at(0);
    };
    const auto alone = in_batch(64, {kAlone});
    CHECK(in_batch(64, among_many(64)) == alone);
    CHECK(in_batch(65, among_many(65)) == in_batch(65, {kAlone}));
    if (card.ctx().may_use_sm90()) CHECK(in_batch(9, among_many(9)) == alone);
  }
}

TEST_CASE("decode: on the GPU a prompt has the same bits alone in a long pass and among others", "[decode][gpu]") {
  if (!require_gpu()) return;
  // The longest is in a pass of its own length, the others share the next shorter one, and the short ones a third.
  const std::vector<int64_t> lengths = {300, 8200, 257, 20, 1000, 256, 513};
  for (const auto& [name, c] : all_kinds(Device::cuda())) {
    INFO(name);
    const auto batch = static_cast<int64_t>(lengths.size());
    DecodeSession session(
        c, {.device = Device::cuda(), .dtype = DType::bf16, .batch = batch, .context = 8300, .starts = true});
    session.model().params().init(session.ctx(), 7);
    std::vector<std::vector<int32_t>> texts;
    for (size_t b = 0; b < lengths.size(); ++b)
      texts.push_back(DecodeFixture::random_tokens(b, lengths[b], c.vocab_size));
    // The logits after the prompts and after a step, and the chosen tokens in between.
    const auto logits = [&](const std::vector<int64_t>& order, bool together) {
      std::vector<DecodeSession::Start> starts;
      for (const int64_t b : order) starts.push_back({b, texts[static_cast<size_t>(b)]});
      if (together) session.start(starts);
      for (size_t i = 0; !together && i < starts.size(); ++i) session.start({&starts[i], 1});
      std::vector<std::vector<float>> all;
      for (int64_t b = 0; b < batch; ++b) all.push_back(session.logits(b));
      session.choose_greedy(), session.step_greedy();
      for (int64_t b = 0; b < batch; ++b) all.push_back(session.logits(b));
      return all;
    };
    const auto alone = logits({0, 1, 2, 3, 4, 5, 6}, false);
    CHECK(logits({0, 1, 2, 3, 4, 5, 6}, true) == alone);
    CHECK(logits({6, 2, 5, 4, 3, 1, 0}, true) == alone);
  }
}

namespace {

class OpCounter : public OpListener {
 public:
  void begin(const char* op) override { ++ops[op]; }
  void end() override {}
  std::map<std::string, int> ops;
};

}  // namespace

TEST_CASE("decode: a pass over several prompts queues no more ops than one over one", "[decode]") {
  for (const auto& [name, c] : all_kinds()) {
    INFO(name);
    DecodeFixture f(c, 3, 96, Device::cpu(), DType::f32, 0.3, 3);
    const auto ops = [&](const std::vector<std::vector<int32_t>>& prompts, const std::vector<int64_t>& begins) {
      OpCounter counter;
      f.ctx().listeners->push_back(&counter);
      f.prefill_packed(prompts, begins);
      f.ctx().listeners->pop_back();
      return counter.ops;
    };
    const auto one = ops({{1, 2, 3}}, {0});
    CHECK(one.at("skinny_linear") == 1);
    CHECK(ops({{1, 2, 3}, {4, 5}, {6, 7, 8, 9}}, {0, 32, 64}) == one);
  }
}

TEST_CASE("decode: more prompts in a pass than one product has rows start as each alone", "[decode]") {
  constexpr int64_t kTexts = 67, kRow = 3 * kTexts;
  const ModelConfig c = config_of(Phi::conv, GateKind::softmax, 6, 2);
  DecodeFixture alone(c, 1, kRow, Device::cpu(), DType::f64),
      packed(c, kTexts, kRow, Device::cpu(), DType::f64, 0.3, kTexts);
  std::vector<std::vector<int32_t>> prompts;
  std::vector<int64_t> begins;
  for (int64_t b = 0; b < kTexts; ++b) {
    prompts.push_back(DecodeFixture::random_tokens(static_cast<uint64_t>(b), 1 + b % 3, c.vocab_size));
    begins.push_back(3 * b);
  }
  packed.prefill_packed(prompts, begins);
  for (const int64_t b : {0, 1, 62, 63, 64, 65, 66}) {
    alone.prefill(0, prompts[static_cast<size_t>(b)]);
    const std::vector<double> want = alone.logits(0), got = packed.logits(b);
    double largest = 0;
    for (size_t i = 0; i < want.size(); ++i) largest = std::max(largest, std::abs(got[i] - want[i]));
    INFO("prompt " << b << ": difference " << largest);
    CHECK(largest <= 1e-11);
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
