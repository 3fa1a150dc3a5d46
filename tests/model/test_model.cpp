// The whole model: every gradient is compared with central differences in double, and CUDA with the CPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "engine/rng.h"
#include "tests/support/model_fixture.h"
#include "tests/support/test.h"

using namespace triad;
using triad::test::ModelFixture;
using triad::test::require_gpu;

namespace {

struct Variant {
  const char* name;
  void (*change)(ModelConfig&);
};
const Variant kVariants[] = {
    {"avg, softmax, silu, untied", [](ModelConfig&) {}},
    {"conv, sigmoid, swiglu, tied",
     [](ModelConfig& c) {
       c.nsa.phi = Phi::conv, c.nsa.gate.kind = GateKind::sigmoid, c.mlp = MlpKind::swiglu, c.mlp_hidden = 24;
       c.tie_embeddings = true;
     }},
    {"mlp, softmax, temperature, swiglu",
     [](ModelConfig& c) {
       c.nsa.phi = Phi::mlp, c.mlp = MlpKind::swiglu, c.mlp_hidden = 24, c.nsa.gate.temperature = 0.7;
     }},
    {"mlp, sigmoid, silu, tied",
     [](ModelConfig& c) { c.nsa.phi = Phi::mlp, c.nsa.gate.kind = GateKind::sigmoid, c.tie_embeddings = true; }},
    {"dense, tied", [](ModelConfig& c) { c.attention = AttentionKind::dense, c.tie_embeddings = true; }},
    {"forced branch", [](ModelConfig& c) { c.nsa.gate.force = Branch::sel; }},
    {"uniform gate", [](ModelConfig& c) { c.nsa.gate.uniform = true; }},
    {"mixed layers, llama3",
     [](ModelConfig& c) {
       c.n_layers = 3, c.dense_layers = "0:1,2:3", c.nsa.phi = Phi::conv;
       c.rope_scaling = RopeScaling::llama3, c.rope_original_len = 16;
       c.resolve();
     }},
    {"shared k and v, avg, yarn",
     [](ModelConfig& c) {
       c.nsa.shared_kv = true, c.rope_scaling = RopeScaling::yarn, c.rope_factor = 4, c.rope_original_len = 32;
     }},
    {"shared k and v, conv, mixed layers",
     [](ModelConfig& c) {
       c.nsa.shared_kv = true, c.nsa.phi = Phi::conv, c.nsa.gate.kind = GateKind::sigmoid, c.dense_layers = "1:2";
       c.resolve();
     }},
    {"shared k and v, mlp", [](ModelConfig& c) { c.nsa.shared_kv = true, c.nsa.phi = Phi::mlp; }},
    {"qkv_bias and qk_norm", [](ModelConfig& c) { c.qkv_bias = c.qk_norm = true; }},
    {"qkv_bias and qk_norm, dense, swiglu, tied",
     [](ModelConfig& c) {
       c.qkv_bias = c.qk_norm = true, c.attention = AttentionKind::dense;
       c.mlp = MlpKind::swiglu, c.mlp_hidden = 24, c.tie_embeddings = true;
     }},
    {"qkv_bias, conv, swiglu",
     [](ModelConfig& c) { c.qkv_bias = true, c.nsa.phi = Phi::conv, c.mlp = MlpKind::swiglu, c.mlp_hidden = 24; }},
    {"qk_norm, mlp, sigmoid, tied",
     [](ModelConfig& c) {
       c.qk_norm = true, c.nsa.phi = Phi::mlp, c.nsa.gate.kind = GateKind::sigmoid, c.tie_embeddings = true;
     }},
    {"nsa.layers, mlp, norms and biases",
     [](ModelConfig& c) {
       c = test::layered_model();
       c.nsa.phi = Phi::mlp, c.qkv_bias = c.qk_norm = true;
       c.resolve();
     }},
    {"nsa.layers, shared k and v, conv, a dense layer",
     [](ModelConfig& c) {
       c = test::layered_model();
       c.nsa.phi = Phi::conv, c.nsa.shared_kv = true, c.dense_layers = "0:1";
       c.resolve();
     }},
    {"a layer without rotation, conv, qk_norm",
     [](ModelConfig& c) {
       c.nope_layers = "1:2", c.nsa.phi = Phi::conv, c.qk_norm = true;
       c.resolve();
     }},
};
constexpr size_t kOnGpu[] = {0, 1, 2, 4, 7, 8, 9, 10, 17};  // the variants whose gradients are compared with the GPU's

// Calls f(layer) for the layers with NSA.
template <class F>
void for_each_nsa_layer(const ModelConfig& c, F&& f) {
  for (int64_t i = 0; i < c.n_layers; ++i)
    if (c.attention_of(i) == AttentionKind::nsa) f(i);
}

double norm(const std::vector<double>& v) {
  double sum = 0;
  for (const double x : v) sum += x * x;
  return std::sqrt(sum);
}

}  // namespace

TEST_CASE("model: every gradient agrees with central differences in double", "[model]") {
  constexpr double kTolerance = 1e-5;
  constexpr int64_t kSamples = 20;
  for (const Variant& variant : kVariants) {
    ModelConfig config = test::small_model();
    variant.change(config);
    ModelFixture f(config, 2, 45, Device::cpu(), DType::f64, 3, 0.3);
    f.loss_and_grads();
    f.model().keep_block_index(true);  // backward treats the selection lists as constants
    for (int64_t i = 0; i < f.model().params().count(); ++i) {
      const ParamSpec& spec = f.model().params().specs()[i];
      const std::vector<double> grad = f.grad(i);
      const int64_t n = spec.shape.numel(), samples = std::min(n, kSamples);
      const Philox random(17, static_cast<uint64_t>(i));
      double error = 0, reference = 0;
      for (int64_t s = 0; s < samples; ++s) {
        const int64_t j =
            n <= kSamples ? s : static_cast<int64_t>(random.below(static_cast<uint64_t>(s), static_cast<uint64_t>(n)));
        const double difference = f.central_difference(i, j);
        error += (difference - grad[j]) * (difference - grad[j]);
        reference += difference * difference;
      }
      INFO(variant.name << ": " << spec.name << " error " << std::sqrt(error) << " of " << std::sqrt(reference));
      // A gradient may be zero by design (forced gates). Its difference quotient is a pure rounding error, hence the
      // 1e-9.
      CHECK(std::sqrt(error) <= kTolerance * std::sqrt(reference) + 1e-9);
    }
  }
}

TEST_CASE("model: biases and norms of q and k have names, shapes and initial values, and do not decay", "[model]") {
  struct Expected {
    const char* name;
    int64_t size;
    double value;
    Branch branch;
  };
  // 6 heads in 2 groups, d_k 6, d_v 5
  const std::vector<Expected> nsa = {{"q_proj.bias", 36, 0, Branch::none},     {"k_cmp_proj.bias", 12, 0, Branch::cmp},
                                     {"v_cmp_proj.bias", 10, 0, Branch::cmp},  {"k_sel_proj.bias", 12, 0, Branch::sel},
                                     {"v_sel_proj.bias", 10, 0, Branch::sel},  {"k_win_proj.bias", 12, 0, Branch::win},
                                     {"v_win_proj.bias", 10, 0, Branch::win},  {"q_norm.weight", 6, 1, Branch::none},
                                     {"k_cmp_norm.weight", 6, 1, Branch::cmp}, {"k_sel_norm.weight", 6, 1, Branch::sel},
                                     {"k_win_norm.weight", 6, 1, Branch::win}};
  const std::vector<Expected> dense = {{"q_proj.bias", 36, 0, Branch::none},
                                       {"k_win_proj.bias", 12, 0, Branch::none},
                                       {"v_win_proj.bias", 10, 0, Branch::none},
                                       {"q_norm.weight", 6, 1, Branch::none},
                                       {"k_win_norm.weight", 6, 1, Branch::none}};
  for (const AttentionKind kind : {AttentionKind::nsa, AttentionKind::dense}) {
    ModelConfig plain = test::small_model();
    plain.attention = kind;
    ModelConfig config = plain;
    config.qkv_bias = config.qk_norm = true;
    const std::vector<Expected>& expected = kind == AttentionKind::nsa ? nsa : dense;
    ModelFixture f(config, 1, 8, Device::cpu(), DType::f64);
    f.model().params().init(f.ctx(), 5);
    const std::vector<ParamSpec>& specs = f.model().params().specs();
    CHECK(specs.size() == param_specs(plain).size() + 2 * expected.size());
    for (const Expected& e : expected) {
      const auto spec = std::find_if(specs.begin(), specs.end(), [&](const ParamSpec& p) {
        return p.name == std::string("blocks.1.attn.") + e.name;
      });
      INFO(e.name);
      REQUIRE(spec != specs.end());
      CHECK(spec->shape == Shape{e.size});
      CHECK(spec->branch == e.branch);
      CHECK_FALSE(spec->decays());
      const int64_t i = spec - specs.begin();
      CHECK(f.model().params().offset(i) >= f.model().params().decay_end());
      for (int64_t j = 0; j < e.size; ++j) CHECK(f.get_f64(i, j) == e.value);
    }
  }
}

TEST_CASE("model: stopgrad_gates lets no gradient through the gates", "[model]") {
  ModelConfig config = test::small_model();
  config.nsa.gate.stop_gradient = true;
  ModelFixture f(config, 1, 40, Device::cpu(), DType::f64);
  f.loss_and_grads();
  for (int64_t i = 0; i < f.model().params().count(); ++i)
    if (f.model().params().specs()[i].name.find("gate.fc") != std::string::npos) CHECK(norm(f.grad(i)) == 0);
}

TEST_CASE("model: the first loss is near ln V + dim * init_std^2 / 2", "[model]") {
  ModelConfig config = test::small_model();
  config.dim = 64, config.vocab_size = 200;
  config.mlp_hidden = 0;
  config.resolve();
  ModelFixture f(config, 2, 60, Device::cpu(), DType::f32);
  f.model().params().init(f.ctx(), 5);
  CHECK(std::abs(f.loss() - (std::log(200.0) + 64 * 0.02 * 0.02 / 2)) < 0.1);
}

TEST_CASE("model: a token does not change the logits of earlier tokens", "[model]") {
  for (const DType dtype : {DType::f64, DType::f32}) {
    ModelFixture f(test::small_model(), 1, 60, Device::cpu(), dtype);
    f.loss();
    const auto row_losses = [&] {
      std::vector<std::byte> raw(static_cast<size_t>(f.activations().x(2).bytes()));
      read(f.ctx(), raw.data(), f.activations().x(2));
      return raw;
    };
    const std::vector<std::byte> before = row_losses();
    constexpr int64_t kChanged = 33;
    int32_t* token = f.activations().tokens.ptr<int32_t>() + kChanged;
    *token = (*token + 1) % 37;
    f.loss();
    const std::vector<std::byte> after = row_losses();
    const auto row_bytes = static_cast<int64_t>(before.size()) / 60;
    CHECK(std::equal(before.begin(), before.begin() + kChanged * row_bytes, after.begin()));
    CHECK(!std::equal(before.begin() + kChanged * row_bytes, before.begin() + (kChanged + 1) * row_bytes,
                      after.begin() + kChanged * row_bytes));
  }
}

namespace {

// 4 layers shaped for the GPU's tensor-core kernels: 6 heads per group, 64 wide.
ModelConfig gpu_model() {
  ModelConfig c;
  c.dim = 128, c.n_layers = 4, c.n_heads = 12, c.n_kv_groups = 2, c.d_k = 64, c.d_v = 64, c.vocab_size = 307;
  c.nsa.l = 32, c.nsa.d = 16, c.nsa.l_sel = 64, c.nsa.n_sel = 4, c.nsa.w = 100;
  c.resolve();
  return c;
}

// How a gradient agrees with a reference, pooled over seeds, because for a small tensor, such as a gate's bias, one
// seed draws rounding errors only once. Tensors whose norm is below `floor` are compared absolutely.
struct Agreement {
  double difference = 0, dot = 0, got = 0, want = 0;  // summed squares and products
  int seeds = 0;
  void add(const std::vector<double>& g, const std::vector<double>& w, double floor) {
    const double size = norm(w), unit = 1 / std::max(size, floor);
    for (size_t i = 0; i < g.size(); ++i) {
      difference += (g[i] - w[i]) * (g[i] - w[i]) * unit * unit;
      if (size >= floor) dot += g[i] * w[i], got += g[i] * g[i], want += w[i] * w[i];
    }
    ++seeds;
  }
  void pool(const Agreement& other) {
    difference += other.difference, dot += other.dot, got += other.got, want += other.want, seeds += other.seeds;
  }
  double relative() const { return std::sqrt(difference / seeds); }
  double cosine() const { return want == 0 ? 1 : dot / std::sqrt(got * want); }
};

// The norm below which Agreement compares a gradient absolutely: 1e-3 times the largest gradient's norm.
double gradient_floor(ModelFixture& f) {
  double largest = 0;
  for (int64_t i = 0; i < f.model().params().count(); ++i) largest = std::max(largest, norm(f.grad(i)));
  return 1e-3 * largest;
}

}  // namespace

TEST_CASE("model: CUDA f32 gradients agree with the CPU's", "[model][gpu]") {
  if (!require_gpu()) return;
  for (const size_t which : kOnGpu) {
    const Variant& variant = kVariants[which];
    ModelConfig config = gpu_model();
    variant.change(config);
    ModelFixture cpu(config, 2, 300, Device::cpu(), DType::f32), gpu(config, 2, 300, Device::cuda(), DType::f32);
    const double cpu_loss = cpu.loss_and_grads();
    for_each_nsa_layer(config, [&](int64_t i) { gpu.set_lists(i, cpu.lists(i)); });
    const double gpu_loss = gpu.loss_and_grads();
    CHECK(std::abs(gpu_loss - cpu_loss) <= 1e-5 * cpu_loss);
    const double floor = gradient_floor(cpu);
    for (int64_t i = 0; i < cpu.model().params().count(); ++i) {
      Agreement agreement;
      agreement.add(gpu.grad(i), cpu.grad(i), floor);
      INFO(variant.name << ": " << cpu.model().params().specs()[i].name << " relative error " << agreement.relative());
      CHECK(agreement.relative() <= 1e-4);
    }
  }
}

TEST_CASE("model: CUDA bf16 gradients are as good as the CPU's rounded to bf16", "[model][gpu]") {
  if (!require_gpu()) return;
  constexpr int kSeeds = 4;
  for (const size_t which : kOnGpu) {
    const Variant& variant = kVariants[which];
    ModelConfig config = gpu_model();
    variant.change(config);
    const std::vector<ParamSpec> specs = param_specs(config);
    std::vector<Agreement> on_gpu(specs.size()), on_cpu(specs.size());
    for (int seed = 0; seed < kSeeds; ++seed) {
      ModelFixture exact(config, 2, 300, Device::cpu(), DType::f32, seed),
          rounded(config, 2, 300, Device::cpu(), DType::bf16, seed),
          gpu(config, 2, 300, Device::cuda(), DType::bf16, seed);
      exact.loss_and_grads();
      for_each_nsa_layer(config, [&](int64_t i) {
        rounded.set_lists(i, exact.lists(i));
        gpu.set_lists(i, exact.lists(i));
      });
      rounded.loss_and_grads();
      gpu.loss_and_grads();
      const double floor = gradient_floor(exact);
      for (size_t i = 0; i < specs.size(); ++i) {
        const std::vector<double> reference = exact.grad(static_cast<int64_t>(i));
        on_gpu[i].add(gpu.grad(static_cast<int64_t>(i)), reference, floor);
        on_cpu[i].add(rounded.grad(static_cast<int64_t>(i)), reference, floor);
      }
    }
    for (size_t i = 0; i < specs.size(); ++i) {
      INFO(variant.name << ": " << specs[i].name << " GPU " << on_gpu[i].relative() << " CPU bf16 "
                        << on_cpu[i].relative() << " cosine " << on_gpu[i].cosine() << " CPU bf16 "
                        << on_cpu[i].cosine());
      if (specs[i].name.find(".gate.") == std::string::npos) CHECK(on_gpu[i].relative() <= 2 * on_cpu[i].relative());
      CHECK(on_gpu[i].cosine() >= 0.999);
    }
    // A gate's gradients are sums over all tokens, times its 3 * Hkv logits: a few independent rounding errors for each
    // seed and layer. The layers are therefore pooled.
    std::map<std::string, std::pair<Agreement, Agreement>>
        gate_agreement;  // GPU and CPU, by the name after the layer's number
    for (size_t i = 0; i < specs.size(); ++i) {
      const size_t at = specs[i].name.find(".gate.");
      if (at == std::string::npos) continue;
      auto& [gpu, cpu] = gate_agreement[specs[i].name.substr(at)];
      gpu.pool(on_gpu[i]), cpu.pool(on_cpu[i]);
    }
    for (const auto& [name, pair] : gate_agreement) {
      INFO(variant.name << ", all layers: " << name << " GPU " << pair.first.relative() << " CPU bf16 "
                        << pair.second.relative());
      CHECK(pair.first.relative() <= 2 * pair.second.relative());
    }
  }
}

TEST_CASE("model: the same inputs give the same bits", "[model]") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    ModelFixture f(test::small_model(), 2, 50, Device::cpu(), dtype);
    f.loss_and_grads();
    std::vector<std::vector<double>> first;
    for (int64_t i = 0; i < f.model().params().count(); ++i) first.push_back(f.grad(i));
    f.ctx().threads = 1;
    f.loss_and_grads();
    for (int64_t i = 0; i < f.model().params().count(); ++i) CHECK(f.grad(i) == first[static_cast<size_t>(i)]);
  }
}

namespace {

// A WeightGate under which each weight is NaN until the forward pass requests it.
class LateWeights final : public WeightGate {
 public:
  explicit LateWeights(const Params& params)
      : params_(params), weights_(params.weights()), bytes_(weights_.data, weights_.data + weights_.bytes()) {
    std::fill_n(weights_.ptr<float>(), weights_.numel(), NAN);
  }
  void begin_forward() override { ++forwards; }
  void begin_backward() override {}
  void need(int64_t segment, const Stream&) override {
    const ConstTensor w = params_.weights(params_.segments()[segment]);
    std::memcpy(weights_.data + (w.data - weights_.data), bytes_.data() + (w.data - weights_.data),
                static_cast<size_t>(w.bytes()));
  }
  int forwards = 0;

 private:
  const Params& params_;
  Tensor weights_;
  std::vector<std::byte> bytes_;
};

}  // namespace

TEST_CASE("model: the forward pass requests each weight before it reads it", "[model]") {
  for (const Variant& variant : kVariants) {
    INFO(variant.name);
    ModelConfig config = test::small_model();
    variant.change(config);
    config.resolve();
    ModelFixture f(config, 2, 70, Device::cpu(), DType::f32);
    const double loss = f.loss();
    const Tensor row_losses = f.activations().row_loss;
    const std::vector<std::byte> rows(row_losses.data, row_losses.data + row_losses.bytes());
    LateWeights gate(f.model().params());
    f.model().forward(f.ctx(), f.activations(), /*stats=*/nullptr, &gate);
    f.model().loss(f.ctx(), f.activations());
    CHECK(std::isfinite(loss));
    CHECK(std::equal(rows.begin(), rows.end(), row_losses.data));
    CHECK(gate.forwards == 1);
  }
}

TEST_CASE("model: the same inputs give the same bits on the GPU", "[model][gpu]") {
  if (!require_gpu()) return;
  ModelFixture f(gpu_model(), 2, 700, Device::cuda(), DType::bf16);
  f.loss_and_grads();
  std::vector<std::vector<double>> first;
  for (int64_t i = 0; i < f.model().params().count(); ++i) first.push_back(f.grad(i));
  for (int repeat = 0; repeat < 3; ++repeat) {
    f.loss_and_grads();
    for (int64_t i = 0; i < f.model().params().count(); ++i) CHECK(f.grad(i) == first[static_cast<size_t>(i)]);
  }
}
