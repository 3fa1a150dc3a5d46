// Models whose linear layers multiply in fp8: bits, distance to the gradients without it, which products they are.
#include <algorithm>
#include <cmath>

#include "kernels/ops/matmul.h"
#include "tests/support/model_fixture.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int64_t kTokens = 70;

ModelConfig model_of(const std::function<void(ModelConfig&)>& change = {}) {
  return changed([&](ModelConfig& c) {
    c.dim = 48, c.n_layers = 3, c.d_k = c.d_v = 8, c.mlp_hidden = 96;
    if (change) change(c);
  });
}

struct Pass {
  double loss = 0;
  std::vector<std::vector<double>> grads;
  int64_t fp8_products = 0, fallbacks = 0;
};

Pass run(const ModelConfig& c, Device device, DType dtype, const std::vector<bool>& fp8_layers,
         const RecomputePlan& plan = {}) {
  ModelFixture f(c, 2, kTokens, device, dtype, 3, 0.1, plan, {}, 0, fp8_layers);
  Pass pass;
  pass.loss = f.loss_and_grads();
  for (int64_t i = 0; i < f.model().params().count(); ++i) pass.grads.push_back(f.grad(i));
  for (const Routes::Count& count : f.ctx().routes.counts())
    if (count.op == "matmul_fp8") (count.is_fallback() ? pass.fallbacks : pass.fp8_products) += count.calls;
  return pass;
}

// |a - b| / |b| over all parameters.
double distance(const Pass& a, const Pass& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.grads.size(); ++i)
    for (size_t j = 0; j < a.grads[i].size(); ++j)
      error += std::pow(a.grads[i][j] - b.grads[i][j], 2), size += std::pow(b.grads[i][j], 2);
  return std::sqrt(error / size);
}

const std::pair<const char*, void (*)(ModelConfig&)> kModels[] = {
    {"NSA", [](ModelConfig&) {}},
    {"dense, swiglu", [](ModelConfig& c) { c.attention = AttentionKind::dense, c.mlp = MlpKind::swiglu; }},
    {"mixed, qkv_bias and qk_norm",
     [](ModelConfig& c) { c.dense_layers = "1:2", c.qkv_bias = c.qk_norm = true, c.mlp = MlpKind::swiglu; }},
    {"shared k and v", [](ModelConfig& c) { c.nsa.shared_kv = true; }}};

}  // namespace

TEST_CASE("fp8: gradients of whole models are near those without it, and the same bits twice", "[fp8]") {
  for (const auto& [name, change] : kModels) {
    const ModelConfig c = model_of(change);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Pass without = run(c, Device::cpu(), dtype, {});
      CHECK(without.fp8_products == 0);
      INFO(name << " " << name_of(dtype));
      constexpr int64_t kProducts = 4 * 3;  // a layer's: four matrices, forward and two in backward
      const auto of = [&](const std::vector<bool>& layers) { return run(c, Device::cpu(), dtype, layers); };
      const Pass with = of({true, true, true});
      CHECK(with.fp8_products == 3 * kProducts);
      CHECK(with.fallbacks == 0);
      CHECK(with.loss == Approx(without.loss).epsilon(0.01));
      const double error = distance(with, without);
      CHECK(error > 1e-3);
      CHECK(error < 0.2);
      CHECK(of({true, true, true}).grads == with.grads);
      const Pass middle = of({false, true, false});
      CHECK(middle.fp8_products == kProducts);
      CHECK(distance(middle, without) < error);
      CHECK(of({false, false, false}).grads == without.grads);
    }
  }
}

TEST_CASE("fp8: each matrix of a layer in fp8 has a gradient near that without it", "[fp8]") {
  for (const auto& [name, change] : kModels) {
    const ModelConfig c = model_of(change);
    const std::vector<ParamSpec> specs = param_specs(c);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Pass without = run(c, Device::cpu(), dtype, {}), with = run(c, Device::cpu(), dtype, {true, true, false});
      for (size_t i = 0; i < specs.size(); ++i) {
        INFO(name << " " << name_of(dtype) << " " << specs[i].name);
        const bool linear = specs[i].name.ends_with("_proj.weight") || specs[i].name.find(".mlp.") != std::string::npos;
        if (!linear) continue;
        const double error = distance({.grads = {with.grads[i]}}, {.grads = {without.grads[i]}});
        CHECK(error > 1e-3);
        CHECK(error < 0.2);
      }
    }
  }
}

TEST_CASE("fp8: recomputation gives the same bits", "[fp8][recompute]") {
  for (const auto& [name, change] : kModels) {
    const ModelConfig c = model_of(change);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Pass kept = run(c, Device::cpu(), dtype, {true, true, false});
      for (const char* plan : {"mlp", "attention", "block", "0:2=mlp,2:3=block"}) {
        INFO(name << " " << name_of(dtype) << " " << plan);
        const RecomputePlan parsed = RecomputePlan::parse(plan, 3);
        CHECK(run(c, Device::cpu(), dtype, {true, true, false}, parsed).grads == kept.grads);
      }
    }
  }
}

TEST_CASE("fp8: a matrix that does not fit stays in the compute dtype, as a fallback", "[fp8]") {
  const ModelConfig c = model_of([](ModelConfig& config) { config.mlp_hidden = 88; });
  const Pass pass = run(c, Device::cpu(), DType::bf16, {true, false, false});
  CHECK(pass.fp8_products == 2 * 3);
  CHECK(pass.fallbacks == 2 * 2);
}

TEST_CASE("fp8: a matrix of a SwiGLU that does not fit leaves the other in fp8", "[fp8]") {
  // gate and up together have a multiple of 16 rows, down has no such number of columns.
  const ModelConfig c = model_of([](ModelConfig& config) {
    config.mlp = MlpKind::swiglu;
    config.mlp_hidden = 88;
  });
  const Pass bf16 = run(c, Device::cpu(), DType::f32, {});
  const Pass pass = run(c, Device::cpu(), DType::f32, {true, true, true});
  CHECK(pass.fp8_products == 3 * 3 * 3);
  CHECK(pass.fallbacks == 3 * 2);
  CHECK(distance(pass, bf16) < 0.2);
}

TEST_CASE("fp8: each pass casts the weights that the model has", "[fp8]") {
  ModelFixture f(model_of(), 2, kTokens, Device::cpu(), DType::f32, 3, 0.1, {}, {}, 0, {true, true, true});
  const double before = f.loss();
  const std::vector<float> same = f.parameters();
  const Params& params = f.model().params();
  for (int64_t i = 0; i < params.count(); ++i) {
    if (!params.specs()[i].name.ends_with("mlp.fc1.weight")) continue;
    const auto first = f.parameters().begin() + params.offset(i);
    std::for_each(first, first + params.specs()[i].shape.numel(), [](float& x) { x *= 1.5f; });
  }
  f.upload();
  CHECK(f.loss() != before);
  f.parameters() = same;
  f.upload();
  CHECK(f.loss() == before);
}

TEST_CASE("fp8: a model in f64 has no fp8 layers", "[fp8]") {
  check_error(
      [&] {
        run(model_of(), Device::cpu(), DType::f64, {true, true, true});
      },
      {"runtime.matmul_dtype is fp8", "f64"});
}

TEST_CASE("fp8: gradients on the GPU are near the CPU's, with all products in fp8", "[fp8][gpu]") {
  if (!require_gpu()) return;
  for (const auto& [name, change] : kModels) {
    INFO(name);
    const ModelConfig c = model_of([&](ModelConfig& config) {
      change(config);
      config.d_k = config.d_v = 64, config.dim = 128;
    });
    const auto of = [&](Device device, const RecomputePlan& plan = {}) {
      return run(c, device, DType::bf16, {true, true, true}, plan);
    };
    const Pass cpu = of(Device::cpu()), gpu = of(Device::cuda());
    CHECK(gpu.fp8_products == cpu.fp8_products);
    CHECK(gpu.fallbacks == 0);
    CHECK(gpu.loss == Approx(cpu.loss).epsilon(0.005));
    CHECK(distance(gpu, cpu) < 0.1);
    CHECK(of(Device::cuda()).grads == gpu.grads);
    for (const char* plan : {"mlp", "block"})
      CHECK(of(Device::cuda(), RecomputePlan::parse(plan, 3)).grads == gpu.grads);
  }
}
