// Passes in which all layers of an NSA model attend densely (Model::attend_densely): they compute what the dense model
// with the same weights computes, and leave the other parameters without a gradient.
#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/model_fixture.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

const std::vector<ParamSpec>& specs_of(ModelFixture& f) { return f.model().params().specs(); }

int64_t index_of(ModelFixture& f, const std::string& name) {
  const std::vector<ParamSpec>& specs = specs_of(f);
  const auto at = std::find_if(specs.begin(), specs.end(), [&](const ParamSpec& p) { return p.name == name; });
  REQUIRE(at != specs.end());
  return at - specs.begin();
}

double norm(const std::vector<double>& v) {
  double sum = 0;
  for (const double x : v) sum += x * x;
  return std::sqrt(sum);
}

struct Variant {
  const char* name;
  std::function<void(ModelConfig&)> change;
  const char* recompute = "none";
};
const std::vector<Variant> kVariants = {
    {"plain", [](ModelConfig&) {}},
    {"shared_kv, mixed layers",
     [](ModelConfig& c) { c.nsa.shared_kv = true, c.dense_layers = "1:2", c.nsa.phi = Phi::mlp; }},
    {"qkv_bias, conv, attention recomputed", [](ModelConfig& c) { c.qkv_bias = true, c.nsa.phi = Phi::conv; },
     "attention"},
    {"qk_norm, swiglu, tied, block recomputed",
     [](ModelConfig& c) {
       c.qk_norm = c.qkv_bias = c.tie_embeddings = true, c.mlp = MlpKind::swiglu, c.mlp_hidden = 24;
     },
     "block"},
};

// Two sequences, three documents each.
const std::vector<int32_t> kBounds = {0, 7, 30, 45, 45 + 20, 45 + 21, 90};

}  // namespace

TEST_CASE("dense pass: loss and gradients are those of the dense model with the same weights", "[model]") {
  for (const Variant& variant : kVariants)
    for (const bool documents : {false, true}) {
      INFO(variant.name << (documents ? ", documents" : ""));
      ModelConfig config = small_model();
      variant.change(config);
      config.resolve();
      ModelConfig dense_config = config;
      dense_config.attention = AttentionKind::dense;
      dense_config.resolve();
      const RecomputePlan recompute = RecomputePlan::parse(variant.recompute, config.n_layers);
      const auto build = [&](const ModelConfig& c) {
        ModelFixture f(c, 2, 45, Device::cpu(), DType::f64, 3, 0.3, recompute, {}, documents ? 3 : 0);
        if (documents) f.set_documents(kBounds);
        return f;
      };
      ModelFixture nsa = build(config), dense = build(dense_config);
      for (int64_t i = 0; i < dense.model().params().count(); ++i) {
        const ParamSpec& spec = specs_of(dense)[static_cast<size_t>(i)];
        const int64_t from = index_of(nsa, spec.name);
        for (int64_t j = 0; j < spec.shape.numel(); ++j) dense.set_f64(i, j, nsa.get_f64(from, j));
      }
      nsa.loss_and_grads();  // leaves an NSA pass's tensors in memory
      nsa.model().attend_densely(true);
      CHECK(nsa.loss_and_grads() == Approx(dense.loss_and_grads()).epsilon(1e-13));
      int64_t unused = 0;
      for (int64_t i = 0; i < nsa.model().params().count(); ++i) {
        const ParamSpec& spec = specs_of(nsa)[static_cast<size_t>(i)];
        std::vector<double> got = nsa.grad(i);
        INFO(spec.name);
        if (!used_by_dense_pass(spec)) {
          CHECK(norm(got) == 0);
          ++unused;
          continue;
        }
        const std::vector<double> expected = dense.grad(index_of(dense, spec.name));
        CHECK(norm(expected) > 0);
        for (size_t j = 0; j < got.size(); ++j) got[j] -= expected[j];
        CHECK(norm(got) <= 1e-12 * norm(expected));
      }
      CHECK(unused == nsa.model().params().count() - dense.model().params().count());
    }
}

TEST_CASE("dense pass: gradients agree with central differences, and NSA passes before and after are alike",
          "[model]") {
  ModelConfig config = small_model();
  config.qk_norm = config.qkv_bias = true;
  ModelFixture f(config, 2, 45, Device::cpu(), DType::f64, 3, 0.3);
  const double loss = f.loss_and_grads();
  const int64_t q = index_of(f, "blocks.0.attn.q_proj.weight");
  const std::vector<double> before = f.grad(q);
  f.model().attend_densely(true);
  CHECK(f.loss_and_grads() != loss);
  for (const char* name : {"blocks.0.attn.k_win_proj.weight", "blocks.0.attn.k_win_norm.weight",
                           "blocks.0.attn.v_win_proj.bias", "blocks.1.attn.q_norm.weight", "embed.weight"}) {
    const int64_t i = index_of(f, name);
    const std::vector<double> grad = f.grad(i);
    const int64_t n = std::min<int64_t>(6, specs_of(f)[static_cast<size_t>(i)].shape.numel());
    for (int64_t j = 0; j < n; ++j) {
      INFO(name << "[" << j << "]");
      CHECK(grad[static_cast<size_t>(j)] == Approx(f.central_difference(i, j)).epsilon(1e-4).margin(1e-9));
    }
  }
  f.model().attend_densely(false);
  CHECK(f.loss_and_grads() == loss);
  CHECK(f.grad(q) == before);
}
