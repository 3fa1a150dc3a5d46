// Cached decoding against the forward pass: the same logits at every position, whatever was prefilled; batches whose
// sequences differ in length; and how many keys a step reads.
#include <cmath>
#include <memory>

#include "engine/graph.h"
#include "engine/rng.h"
#include "kernels/next_token.h"
#include "model/decode.h"
#include "tests/model_fixture.h"
#include "tests/test.h"
#include "train/inference.h"

using namespace triad;
using triad::test::require_gpu;

namespace {

// A model of random weights, a decoder of B sequences, and a forward pass of one sequence of T tokens.
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
    runtime_ = std::make_unique<Runtime>(
        Runtime::Options{.device = device, .arena_bytes = arena, .scratch_bytes = scratch});
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

  static std::vector<int32_t> random_tokens(uint64_t stream, int64_t n, int64_t vocab) {
    std::vector<int32_t> tokens;
    const Philox random(5, stream);
    for (int64_t i = 0; i < n; ++i)
      tokens.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(i), static_cast<uint64_t>(vocab))));
    return tokens;
  }

  // The logits of every row of a forward pass over these tokens, and padding behind them.
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
  Arena& arena() { return runtime_->arena(); }
  Model& model() { return *model_; }
  Decoder& decoder() { return *decoder_; }

 private:
  void build(Runtime& runtime) {
    model_ = std::make_unique<Model>(runtime.ctx(), runtime.arena(), config_,
                                     Model::Options{.dtype = dtype_, .training = false, .max_seq_len = T_});
    act_ = std::make_unique<Activations>(runtime.arena(), config_, 1, T_, dtype_, false);
    decoder_ = std::make_unique<Decoder>(runtime.ctx(), runtime.arena(), *model_, B_, T_);
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
  Tensor one_row_;
};

double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(difference / size);
}

// 2 layers; 310 tokens cross every boundary of l, d, l' and w many times over.
ModelConfig config_of(Phi phi, GateKind gate, int64_t heads, int64_t groups) {
  ModelConfig c = test::small_model();
  c.n_heads = heads, c.n_kv_groups = groups;
  c.nsa.phi = phi, c.nsa.gate.kind = gate;
  return c;
}
constexpr int64_t kTokens = 310;

// The largest error over the steps from `prefilled` tokens to the end.
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
                     std::initializer_list<int64_t> prefills, const std::string& name) {
  DecodeFixture f(config, 1, kTokens, device, dtype);
  const std::vector<int32_t> tokens = DecodeFixture::random_tokens(0, kTokens, config.vocab_size);
  const auto reference = f.forward(tokens);
  for (const int64_t prefilled : prefills) {
    const double error = largest_error(f, tokens, reference, prefilled);
    INFO(name << ", " << prefilled << " tokens prefilled: relative error " << error);
    CHECK(error <= tolerance);
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

TEST_CASE("decode: a prefill of any length goes on as the forward pass does", "[decode]") {
  // one short of a block, a block, a stride more, one short of a window, a window, n blocks, all but one
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
}
