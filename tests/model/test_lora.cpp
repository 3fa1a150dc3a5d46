// Models with adapters (model/lora.h): their gradients against differences, their loss against that of the model with
// merged weights, what is frozen, and the list of parameters.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/lora.h"
#include "tests/support/model_fixture.h"
#include "tests/support/test.h"
#include "train/inference.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int64_t kTokens = 45;

LoraConfig lora_of(int64_t rank, double alpha = 0, std::vector<std::string> targets = {"all-linear"},
                   bool rslora = false) {
  LoraConfig lora;
  lora.rank = rank, lora.alpha = alpha, lora.targets = std::move(targets), lora.rslora = rslora;
  return lora;
}

struct Case {
  const char* name;
  ModelConfig config;
  LoraConfig lora;
  const char* recompute = "none";
  bool dense = false;
};

ModelConfig small(const std::function<void(ModelConfig&)>& change = [](ModelConfig&) {}) {
  ModelConfig c = small_model();
  change(c);
  c.resolve();
  return c;
}

std::vector<Case> cases() {
  const auto swiglu = [](ModelConfig& c) { c.mlp = MlpKind::swiglu, c.mlp_hidden = 20; };
  return {{"NSA, all projections", small(), lora_of(3, 5)},
          {"NSA, shared keys, blocks recomputed", small([](ModelConfig& c) { c.nsa.shared_kv = true; }),
           lora_of(2, 0, {"k_proj", "fc1"}), "block"},
          {"dense, swiglu, norms, biases, tied head", small([&](ModelConfig& c) {
             swiglu(c);
             c.attention = AttentionKind::dense, c.qk_norm = c.qkv_bias = c.tie_embeddings = true;
           }),
           lora_of(4, 2, {"q_proj", "v_proj", "up_proj", "down_proj"}, true)},
          {"index, one softmax, norms, mlp and attention recomputed", small([&](ModelConfig& c) {
             swiglu(c);
             c.nsa.selector = Selector::index, c.nsa.d_index = 6, c.nsa.branches = Branches::selected, c.qk_norm = true;
           }),
           lora_of(2, 0, {"o_proj", "gate_proj", "v_proj"}), "0:1=mlp,1:2=attention"},
          {"NSA in a dense pass", small(), lora_of(2), "none", true}};
}

ModelFixture build(const Case& c, bool with_lora = true) {
  ModelFixture f(c.config, 1, kTokens, Device::cpu(), DType::f64, 3, 0.3,
                 RecomputePlan::parse(c.recompute, c.config.n_layers), {}, 0, {},
                 with_lora ? std::optional(c.lora) : std::nullopt);
  f.model().attend_densely(c.dense);
  return f;
}

// A weight with its adapters' product added, in f64.
std::vector<double> merged(ModelFixture& f, const ParamSpec& spec, double scale) {
  std::map<std::string, std::vector<double>> own;
  for (Params* params : {&f.model().params(), f.model().base()})
    for (int64_t i = 0; i < params->count(); ++i)
      own[params->specs()[static_cast<size_t>(i)].name] = read_floats(f.ctx(), params->part(params->weights(), i));
  std::vector<double> w = own.at(spec.name);
  if (!spec.name.ends_with(".weight") || !own.contains(lora_name(spec.name, 'A'))) return w;
  const std::vector<double>&a = own.at(lora_name(spec.name, 'A')), &b = own.at(lora_name(spec.name, 'B'));
  const auto width = static_cast<size_t>(spec.shape[1]), rank = a.size() / width;
  for (size_t i = 0; i < w.size(); ++i)
    for (size_t k = 0; k < rank; ++k) w[i] += scale * b[i / width * rank + k] * a[k * width + i % width];
  return w;
}

}  // namespace

TEST_CASE("lora: the loss is that of the merged weights", "[model]") {
  for (const Case& c : cases()) {
    INFO(c.name);
    ModelFixture adapted = build(c), plain = build(c, false);
    const double before = plain.loss();
    for (int64_t i = 0; i < plain.model().params().count(); ++i) {
      const std::vector<double> w =
          merged(adapted, plain.model().params().specs()[static_cast<size_t>(i)], c.lora.scale());
      for (size_t j = 0; j < w.size(); ++j) plain.set_f64(i, static_cast<int64_t>(j), w[j]);
    }
    const double loss = adapted.loss();
    CHECK(loss == Approx(plain.loss()).epsilon(1e-12));
    CHECK(std::abs(loss - before) > 1e-3);
  }
}

TEST_CASE("lora: a model with adapters has no layers in fp8", "[model]") {
  check_error(
      [] {
        ModelFixture(small(), 1, 8, Device::cpu(), DType::f32, 3, 0.1, {}, {}, 0, {true, false}, lora_of(2));
      },
      {"adapters", "fp8"});
}

TEST_CASE("lora: gradients are differences of the loss, and nothing else has one", "[model]") {
  for (const Case& c : cases()) {
    INFO(c.name);
    ModelFixture f = build(c);
    f.loss_and_grads();
    const Params& params = f.model().params();
    std::vector<std::vector<double>> grads;
    for (int64_t i = 0; i < params.count(); ++i) grads.push_back(f.grad(i));
    for (int64_t i = 0; i < c.config.n_layers && !c.dense; ++i)
      if (c.config.has_lists(i)) f.set_lists(i, f.lists(i));
    for (int64_t i = 0; i < params.count(); ++i) {
      const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
      INFO(spec.name);
      CHECK((is_adapter(spec.role) || stays_trained(spec.role)));
      if (is_index(spec.role)) continue;  // tests/model/test_taught.cpp
      const int64_t n = spec.shape.numel();
      for (int64_t element = 0; element < n; element += std::max<int64_t>(1, n / 4))
        CHECK(grads[static_cast<size_t>(i)][static_cast<size_t>(element)] ==
              Approx(f.central_difference(i, element)).epsilon(1e-6).margin(1e-9));
    }
  }
}

TEST_CASE("lora: the list of parameters", "[model]") {
  const ModelConfig c = cases()[2].config;
  const std::optional<LoraConfig> lora = cases()[2].lora;
  std::vector<std::string> names;
  for (const ParamSpec& spec : trained_specs(c, lora))
    if (spec.layer == 1) names.push_back(spec.name.substr(std::string("blocks.1.").size()) + " " + spec.shape.str());
  const auto shape = [](int64_t rows, int64_t columns) { return " " + Shape{rows, columns}.str(); };
  const int64_t q = c.n_heads * c.d_k, v = c.n_kv_groups * c.d_v;
  CHECK(names ==
        std::vector<std::string>{
            "attn.q_proj.lora_A.weight" + shape(4, c.dim), "attn.v_win_proj.lora_A.weight" + shape(4, c.dim),
            "attn.q_proj.lora_B.weight" + shape(q, 4), "attn.v_win_proj.lora_B.weight" + shape(v, 4),
            "mlp.up_proj.lora_A.weight" + shape(4, c.dim), "mlp.up_proj.lora_B.weight" + shape(c.mlp_hidden, 4),
            "mlp.down_proj.lora_A.weight" + shape(4, c.mlp_hidden), "mlp.down_proj.lora_B.weight" + shape(c.dim, 4)});
  CHECK(count_elements(frozen_specs(c, lora)) == count_parameters(c));
  CHECK(frozen_specs(c, {}).empty());
  CHECK(lora_of(4).scale() == 1);
  CHECK(lora_of(4, 2, {}, true).scale() == 1);
}

TEST_CASE("lora: A is uniform below 1/sqrt(its width), B is 0, and the first loss is the base's", "[model]") {
  const Case c = cases()[0];
  ModelFixture f = build(c), plain = build(c, false);
  Params& params = f.model().params();
  for (int64_t i = 0; i < params.count(); ++i)
    if (is_adapter(params.specs()[static_cast<size_t>(i)].role)) params.init(f.ctx(), i, 7);
  CHECK(f.loss() == plain.loss());
  for (int64_t i = 0; i < params.count(); ++i) {
    const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
    if (!is_adapter(spec.role)) continue;
    INFO(spec.name);
    double most = 0, sum = 0;
    for (const double x : read_floats(f.ctx(), params.part(params.weights(), i)))
      most = std::max(most, std::abs(x)), sum += x * x;
    const bool is_a = spec.name.find("lora_A") != std::string::npos;
    const double bound = is_a ? 1 / std::sqrt(static_cast<double>(spec.shape[1])) : 0;
    CHECK(most <= bound);
    if (is_a) CHECK(most > 0.8 * bound);
    const double mean = sum / static_cast<double>(spec.shape.numel());
    CHECK(mean == Approx(bound * bound / 3).epsilon(0.5));
  }
}
