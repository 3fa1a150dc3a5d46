// Formulas that central differences cannot check: ops without a gradient, constants that forward and backward share,
// and the step from gradients to new weights. Each op on the CPU is compared with its formula in double. The GPU is
// compared with the CPU by the case tables (test_ops.cpp).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numbers>
#include <numeric>
#include <vector>

#include "engine/random_streams.h"
#include "engine/rng.h"
#include "kernels/nsa/branch_sum.h"
#include "kernels/nsa/gate.h"
#include "kernels/ops/cast.h"
#include "kernels/ops/column_sum.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/qk_norm.h"
#include "kernels/ops/rmsnorm.h"
#include "kernels/ops/rope.h"
#include "kernels/step/reduce.h"
#include "kernels/update/adamw.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/config/schedule.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;

namespace {

using Values = std::vector<double>;

// Tensors on the CPU, in double by default.
class Lab {
 public:
  Lab() : rt_({.device = Device::cpu(), .arena_bytes = int64_t{8} << 20, .scratch_bytes = int64_t{1} << 20}) {}
  Context& ctx() { return rt_.ctx(); }
  Tensor empty(const Shape& shape, DType dtype = DType::f64) {
    return rt_.arena().alloc(MemTag::io, "test", dtype, shape);
  }
  Tensor from(const Values& values, const Shape& shape) {
    const Tensor t = empty(shape);
    std::copy(values.begin(), values.end(), t.ptr<double>());
    return t;
  }
  static Values values(const Tensor& t) { return {t.ptr<double>(), t.ptr<double>() + t.numel()}; }

 private:
  Runtime rt_;
};

Values normal(int64_t n, uint64_t stream, double std = 1) {
  Values out(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    out[static_cast<size_t>(i)] = std * Philox(5, stream).normal(static_cast<uint64_t>(i));
  return out;
}

double largest_difference(const Values& a, const Values& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

constexpr double kTiny = 1e-13;

}  // namespace

TEST_CASE("formula: AdamW, three steps from zero moments", "[formulas]") {
  constexpr int64_t n = 5000;  // more elements than one thread processes
  constexpr double kLr = 0.01, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-3, kDecay = 0.1;
  for (const double grad_clip : {0.0, 1e6, 2.0}) {  // no clipping; a limit above the norm; a limit below it
    Lab lab;
    Values p = normal(n, 0), m(n, 0.0), v(n, 0.0);
    const Tensor master = lab.from(p, {n}), m_t = lab.from(m, {n}), v_t = lab.from(v, {n}),
                 weights = lab.empty({n}, DType::bf16);
    for (int64_t step = 1; step <= 3; ++step) {
      const Values g = normal(n, static_cast<uint64_t>(step), 0.05);
      const double norm_squared = std::inner_product(g.begin(), g.end(), g.begin(), 0.0),
                   norm = std::sqrt(norm_squared);
      REQUIRE((norm > 2.0 && norm < 1e6));
      adamw(lab.ctx(), master, weights, m_t, v_t, lab.from(g, {n}), lab.from({norm_squared}, {1}),
            {.lr = kLr,
             .beta1 = kBeta1,
             .beta2 = kBeta2,
             .eps = kEps,
             .weight_decay = kDecay,
             .grad_clip = grad_clip,
             .step = step});
      const double clip = grad_clip == 2.0 ? 2.0 / (norm + 1e-6) : 1.0;
      for (size_t i = 0; i < p.size(); ++i) {
        m[i] = kBeta1 * m[i] + (1 - kBeta1) * clip * g[i];
        v[i] = kBeta2 * v[i] + (1 - kBeta2) * std::pow(clip * g[i], 2);
        const double m_hat = m[i] / (1 - std::pow(kBeta1, step)), v_hat = v[i] / (1 - std::pow(kBeta2, step));
        p[i] -= kLr * (kDecay * p[i] + m_hat / (std::sqrt(v_hat) + kEps));
      }
    }
    INFO("grad_clip " << grad_clip);
    CHECK(largest_difference(Lab::values(master), p) < kTiny);
    CHECK(largest_difference(Lab::values(m_t), m) < kTiny);
    CHECK(largest_difference(Lab::values(v_t), v) < kTiny);
    bool rounded = true;
    for (int64_t i = 0; i < n; ++i)
      rounded = rounded && weights.ptr<bf16>()[i].bits == bf16(static_cast<float>(master.ptr<double>()[i])).bits;
    CHECK(rounded);
  }
}

TEST_CASE("formula: AdamW changes nothing if the norm is not finite", "[formulas]") {
  Lab lab;
  const Tensor p = lab.from({1, 2}, {2}), m = lab.from({3, 4}, {2}), v = lab.from({5, 6}, {2}),
               g = lab.from({1, 1}, {2});
  for (const double norm_squared : {std::nan(""), HUGE_VAL})
    adamw(lab.ctx(), p, {}, m, v, g, lab.from({norm_squared}, {1}), {.lr = 0.1, .weight_decay = 0.1});
  CHECK(Lab::values(p) == Values{1, 2});
  CHECK(Lab::values(m) == Values{3, 4});
  CHECK(Lab::values(v) == Values{5, 6});
}

TEST_CASE("formula: the learning rate rises linearly, then falls along half a cosine", "[formulas]") {
  TrainConfig c;
  c.steps = 110, c.warmup_steps = 10, c.lr = 2.0, c.min_lr_fraction = 0.25;
  const auto near = [&](int64_t step, double rate) { return std::abs(learning_rate(c, step) - rate) < kTiny; };
  CHECK(near(0, 0.2));
  CHECK(near(4, 1.0));
  CHECK(near(9, 2.0));
  CHECK(near(10, 2.0));
  CHECK(near(35, 0.5 + 1.5 * (1 + std::numbers::sqrt2 / 2) / 2));  // a quarter of the cosine
  CHECK(near(60, 1.25));
  CHECK(near(110, 0.5));
  CHECK(near(500, 0.5));
  c.warmup_steps = 0;
  CHECK(near(0, 2.0));
  CHECK(near(55, 1.25));
}

TEST_CASE("formula: the learning rate falls linearly after the warmup, or with wsd in the last steps", "[formulas]") {
  TrainConfig c;
  c.steps = 110, c.warmup_steps = 10, c.lr = 2.0, c.min_lr_fraction = 0.25, c.schedule = Schedule::linear;
  const auto near = [&](int64_t step, double rate) { return std::abs(learning_rate(c, step) - rate) < kTiny; };
  CHECK(near(4, 1.0));
  CHECK(near(10, 2.0));
  CHECK(near(60, 1.25));
  CHECK(near(85, 0.875));
  CHECK(learning_rate(c, 110) == 0.5);
  CHECK(learning_rate(c, 500) == 0.5);
  c.steps = 100, c.schedule = Schedule::wsd, c.decay_fraction = 0.2;
  CHECK(near(4, 1.0));
  for (const int64_t step : {9, 10, 40, 79}) CHECK(learning_rate(c, step) == 2.0);
  CHECK(near(80, 2.0));
  CHECK(near(90, 1.25));
  CHECK(near(99, 0.575));
  CHECK(learning_rate(c, 100) == 0.5);
  CHECK(learning_rate(c, 500) == 0.5);
  c.steps = 10, c.warmup_steps = 0, c.decay_fraction = 0.25;  // 2.5 steps, rounded to 3
  CHECK(learning_rate(c, 6) == 2.0);
  CHECK(near(7, 2.0));
  CHECK(near(8, 1.5));
  c.decay_fraction = 1;
  CHECK(near(0, 2.0));
  CHECK(near(5, 1.25));
  c.decay_fraction = 0;
  for (const int64_t step : {0, 9, 10, 500}) CHECK(learning_rate(c, step) == 2.0);
}

namespace {

// configs/tiny.json's model on the CPU in fp32, and gradients for given tokens.
struct TinyStep {
  explicit TinyStep(int64_t micro_batch_size, bool qkv_bias_and_qk_norm = false, int64_t micro_steps = 1)
      : config(load_config(TRIAD_SOURCE_DIR "/configs/tiny.json",
                           {"train.micro_batch_size=" + std::to_string(micro_batch_size),
                            "train.accumulate_grad_batches=" + std::to_string(micro_steps),
                            fmt::format("model.qkv_bias={}", qkv_bias_and_qk_norm),
                            fmt::format("model.qk_norm={}", qkv_bias_and_qk_norm)})
                   .config),
        runtime(allocate_planned(config, Device::cpu())),
        step(*runtime, config) {
    step.model().params().init(runtime->ctx(), 7);
  }
  const Params& params() { return step.model().params(); }
  Values read_all(const Tensor& t) {
    std::vector<float> host(static_cast<size_t>(t.numel()));
    read(runtime->ctx(), host.data(), t);
    return {host.begin(), host.end()};
  }
  // Returns the mean loss's slope along `direction` (normalized here), by a central difference.
  double slope(const Values& direction, std::span<const int32_t> tokens, std::span<const int32_t> targets) {
    constexpr double kStep = 0.02;
    const Values start = read_all(params().master());
    const double norm = std::sqrt(std::inner_product(direction.begin(), direction.end(), direction.begin(), 0.0));
    const auto loss_at = [&](double distance) {
      std::vector<float> moved(start.size());
      for (size_t i = 0; i < moved.size(); ++i)
        moved[i] = static_cast<float>(start[i] + distance / norm * direction[i]);
      step.model().params().set(runtime->ctx(), moved);
      return step.evaluate(tokens, targets) / static_cast<double>(tokens.size());
    };
    const double rise = loss_at(kStep) - loss_at(-kStep);
    loss_at(0);
    return rise / (2 * kStep);
  }
  Config config;
  std::unique_ptr<Runtime> runtime;
  TrainStep step;
};

std::vector<int32_t> some_tokens(int64_t n, uint64_t stream) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < n; ++i)
    out.push_back(static_cast<int32_t>(Philox(9, stream).below(static_cast<uint64_t>(i), 256)));
  return out;
}

}  // namespace

TEST_CASE("formula: two micro-batches equal one batch of twice the size, and begin() resets the sums", "[formulas]") {
  // An evaluation would overwrite the gradients if the step had one micro-step.
  TinyStep whole(2, false, 2), halves(1, false, 2);
  const int64_t positions = 2 * whole.config.train.seq_len, half = positions / 2;
  const std::vector<int32_t> tokens = some_tokens(positions, 0), targets = some_tokens(positions, 1);
  const std::span<const int32_t> all_tokens(tokens), all_targets(targets);
  whole.step.begin();
  whole.step.micro_step(all_tokens, all_targets, positions);
  const Values want = whole.read_all(whole.params().grads());
  const double norm = std::sqrt(std::inner_product(want.begin(), want.end(), want.begin(), 0.0));
  REQUIRE(norm > 0.01);
  CHECK(std::abs(whole.slope(want, all_tokens, all_targets) - norm) < 0.01 * norm);
  for (int repeat = 0; repeat < 2; ++repeat) {
    halves.step.begin();
    for (const int64_t begin : {int64_t{0}, half})
      halves.step.micro_step(all_tokens.subspan(begin, half), all_targets.subspan(begin, half), positions);
    CHECK(largest_difference(halves.read_all(halves.params().grads()), want) < 1e-6 * norm);
  }
  const TrainStep::Result a = whole.step.finish(0, positions), b = halves.step.finish(0, positions);
  CHECK(std::abs(a.loss - std::log(256.0)) < 0.1);  // initial weights' loss is near that of uniform guesses
  CHECK(std::abs(a.loss - b.loss) < 1e-6);
  CHECK(std::abs(a.grad_norm - norm) < 1e-5 * norm);
  CHECK(std::abs(b.grad_norm - norm) < 1e-5 * norm);
}

// After one step from zero moments, m is (1 - beta1) g'. The update's size then depends on the bias correction, and so
// reveals which step number the optimizer used.
TEST_CASE("formula: the optimizer counts steps from one, decays only matrices and follows the schedule", "[formulas]") {
  for (const auto& [step, qkv] : {std::pair<int64_t, bool>{0, false}, {5, false}, {5, true}}) {
    TinyStep tiny(1, qkv);
    const TrainConfig& c = tiny.config.train;
    const std::vector<int32_t> tokens = some_tokens(c.seq_len, 0), targets = some_tokens(c.seq_len, 1);
    const Values before = tiny.read_all(tiny.params().master());
    tiny.step.begin();
    tiny.step.micro_step(tokens, targets, c.seq_len);
    const double clip = std::min(1.0, c.grad_clip / (tiny.step.finish(step, c.seq_len).grad_norm + 1e-6));
    const Values after = tiny.read_all(tiny.params().master()), grads = tiny.read_all(tiny.params().grads());
    const double rate = learning_rate(c, step), count = static_cast<double>(step + 1);
    double largest = 0;
    for (int64_t i = 0; i < tiny.params().count(); ++i) {
      const ParamSpec& spec = tiny.params().specs()[static_cast<size_t>(i)];
      const double decay = spec.shape.rank >= 2 ? c.weight_decay : 0;
      for (int64_t j = 0; j < spec.shape.numel(); ++j) {
        const size_t at = static_cast<size_t>(tiny.params().offset(i) + j);
        const double g = clip * grads[at];
        const double m_hat = (1 - c.beta1) * g / (1 - std::pow(c.beta1, count));
        const double v_hat = (1 - c.beta2) * g * g / (1 - std::pow(c.beta2, count));
        const double want = before[at] - rate * (decay * before[at] + m_hat / (std::sqrt(v_hat) + c.eps));
        largest = std::max(largest, std::abs(after[at] - want));
      }
    }
    INFO("step " << step << ", rate " << rate);
    CHECK(largest < 2e-3 * rate);  // a weight near 1 is rounded by up to 6e-8
  }
}

TEST_CASE("formula: sums and sums of squares", "[formulas]") {
  for (const int64_t n : {1, 1000, 16384, 40001}) {  // their sums have one to three partial sums
    Lab lab;
    Values x(static_cast<size_t>(n));
    std::iota(x.begin(), x.end(), 1.0);
    const double N = static_cast<double>(n), total = N * (N + 1) / 2, squares = N * (N + 1) * (2 * N + 1) / 6;
    const Tensor t = lab.from(x, {n}), out = lab.empty({1});
    sum(lab.ctx(), out, t);
    CHECK(*out.ptr<double>() == total);
    sum_of_squares(lab.ctx(), out, t, /*add=*/true);
    CHECK(std::abs(*out.ptr<double>() - (total + squares)) <= 1e-14 * squares);
    sum_of_squares(lab.ctx(), out, t);
    CHECK(std::abs(*out.ptr<double>() - squares) <= 1e-14 * squares);
  }
}

TEST_CASE("formula: rounding to bf16 is to nearest, ties to even", "[formulas]") {
  struct Rounding {
    double from;
    float to;
  };
  const double half = 0x1p-8;  // half a unit in a bf16's last place near 1
  const Rounding roundings[] = {{1 + half, 1.0f},
                                {1 + 3 * half, 1 + 4 * 0x1p-8f},
                                {1 + 1.01 * half, 1 + 2 * 0x1p-8f},
                                {-1 - half, -1.0f},
                                {1 + half + 0x1p-40, 1 + 2 * 0x1p-8f},
                                {1 + half - 0x1p-40, 1.0f},
                                {1e-3, 0.00099945068359375f},
                                {0, 0.0f}};
  Lab lab;
  for (const auto& [from, to] : roundings) {
    const Tensor x = lab.from({from}, {1}), y = lab.empty({1}, DType::bf16);
    cast(lab.ctx(), y, x);
    INFO(from);
    CHECK(static_cast<float>(*y.ptr<bf16>()) == to);
  }
}

// The expected numbers come from ROPE_INIT_FUNCTIONS["llama3"] and ["yarn"] in transformers 5.24.0 (f32), called with a
// LlamaConfig with this head_dim and rope_parameters, low_freq_factor 1, high_freq_factor 4, beta_fast 32, beta_slow 1.
TEST_CASE("formula: the frequencies of llama3 and yarn are those of transformers", "[formulas]") {
  struct Case {
    int64_t head_dim;
    RopeOptions options;
    Values radians;
    double factor;
  };
  const RopeScaling llama3 = RopeScaling::llama3, yarn = RopeScaling::yarn;
  const std::vector<Case> cases = {
      {16,
       {.theta = 500000, .scaling = llama3},
       {1.0, 0.193922758, 0.0376060307, 0.00729266508, 0.000524846022, 3.42810235e-05, 6.64786967e-06, 1.28917316e-06},
       1},
      {16,
       {.scaling = llama3, .original_len = 32},
       {1.0, 0.0958399773, 0.0125000002, 0.00395284733, 0.00124999997, 0.000395284733, 0.000125000006, 3.95284733e-05},
       1},
      {16,
       {.scaling = yarn, .factor = 4, .original_len = 32},
       {1.0, 0.197642356, 0.0250000004, 0.00790569466, 0.00249999994, 0.000790569466, 0.000250000012, 7.90569466e-05},
       1.138629436111989},
      {32,
       {.theta = 1e6, .scaling = yarn, .factor = 4, .original_len = 32768},
       {1.0, 0.421696514, 0.177827939, 0.0749894157, 0.0316227786, 0.0133352149, 0.00477990136, 0.00165996165,
        0.000549999997, 0.000168678584, 4.44569851e-05, 1.87473561e-05, 7.90569356e-06, 3.33380353e-06, 1.40585337e-06,
        5.92843435e-07},
       1.138629436111989},
      // The pairs between which yarn mixes lie outside the head.
      {16,
       {.theta = 100, .scaling = yarn, .factor = 4, .original_len = 1000000000},
       {0.25, 0.140585333, 0.079056941, 0.0444569848, 0.0250000004, 0.0140585322, 0.00790569466, 0.00444569858},
       1.138629436111989}};
  Lab lab;
  for (const Case& c : cases) {
    const RopeFrequencies got = rope_frequencies(c.head_dim, c.options);
    REQUIRE(got.radians.size() == c.radians.size());
    CHECK(got.factor == Approx(c.factor).epsilon(1e-14));
    for (size_t j = 0; j < c.radians.size(); ++j) CHECK(got.radians[j] == Approx(c.radians[j]).epsilon(2e-6));
    // The table: cos and sin (position times frequency), times the factor.
    const int64_t half = c.head_dim / 2;
    const Tensor cos = lab.empty({8, half}), sin = lab.empty({8, half});
    rope_table(lab.ctx(), cos, sin, c.head_dim, c.options);
    const Values cosines = Lab::values(cos), sines = Lab::values(sin);
    for (size_t j = 0; j < c.radians.size(); ++j) {
      const size_t at = 7 * static_cast<size_t>(half) + j;
      CHECK(cosines[at] == Approx(c.factor * std::cos(7 * got.radians[j])).epsilon(1e-12));
      CHECK(sines[at] == Approx(c.factor * std::sin(7 * got.radians[j])).epsilon(1e-12));
    }
  }
}

TEST_CASE("formula: the sum of the branches' gradients", "[formulas]") {
  Lab lab;
  const Tensor out = lab.empty({2, 2});
  branch_sum(lab.ctx(), out, lab.from({1, 2, 10, 20, 100, 200, 3, 4, 30, 40, 300, 400}, {2, 6}));
  CHECK(Lab::values(out) == Values{111, 222, 333, 444});
  // In bf16 the sum is rounded once: 256 + 1 + 1 = 258, and with a rounding in between it would be 256.
  const Tensor rounded = lab.empty({1, 1}, DType::bf16), parts = lab.empty({1, 3}, DType::bf16);
  cast(lab.ctx(), parts, lab.from({256, 1, 1}, {1, 3}));
  branch_sum(lab.ctx(), rounded, parts);
  CHECK(static_cast<float>(*rounded.ptr<bf16>()) == 258);
}

TEST_CASE("formula: RMSNorm's epsilon, rope's angles, the gate's temperature, matmul's factor", "[formulas]") {
  Lab lab;
  {  // rows so small that epsilon matters
    const Tensor y = lab.empty({1, 2}), rrms = lab.empty({1});
    rmsnorm_forward(lab.ctx(), y, rrms, lab.from({3e-3, -4e-3}, {1, 2}), lab.from({2, 5}, {2}), 1e-6);
    const double r = 1 / std::sqrt(12.5e-6 + 1e-6);
    CHECK(largest_difference(Lab::values(y), {6e-3 * r, -20e-3 * r}) < kTiny);
  }
  {  // scale 2 turns position 3 into angle 1.5: the pairs (x0, x2) and (x1, x3) rotate by 1.5 and 1.5 / 100
    const Tensor cos = lab.empty({4, 2}), sin = lab.empty({4, 2}), y = lab.empty({1, 4, 1, 4});
    rope_table(lab.ctx(), cos, sin, 4, {.scale = 2});
    Values x(16, 0.0);
    for (size_t j = 0; j < 4; ++j) x[12 + j] = static_cast<double>(j + 1);
    rope_forward(lab.ctx(), y, lab.from(x, {1, 4, 1, 4}), cos, sin);
    const double a = 1.5, b = 0.015;
    const Values turned = {std::cos(a) - 3 * std::sin(a), 2 * std::cos(b) - 4 * std::sin(b),
                           3 * std::cos(a) + std::sin(a), 4 * std::cos(b) + 2 * std::sin(b)};
    const Values got = Lab::values(y);
    CHECK(largest_difference({got.begin() + 12, got.end()}, turned) < kTiny);
  }
  for (const double temperature : {1.0, 0.5}) {  // q's mean over the two heads is (1, 3); fc1 maps it to 2
    const Tensor gate = lab.empty({3, 1, 1, 1});
    const GateWeights w = {lab.from({0.25, 0.5}, {1, 2}), lab.from({0.25}, {1}), lab.from({1, 2, -1}, {3, 1}),
                           lab.from({0.5, -1, 0}, {3})};
    nsa_gate_forward(lab.ctx(), gate, lab.from({0, 2, 2, 4}, {1, 1, 2, 2}), w, {.temperature = temperature});
    const double act = 2 / (1 + std::exp(-2.0));
    const Values e = {std::exp((act + 0.5) / temperature), std::exp((2 * act - 1) / temperature),
                      std::exp(-act / temperature)};
    const double total = e[0] + e[1] + e[2];
    CHECK(largest_difference(Lab::values(gate), {e[0] / total, e[1] / total, e[2] / total}) < kTiny);
  }
  const Tensor d = lab.empty({2, 1});
  matmul(lab.ctx(), d, lab.from({1, 2, 3, 4}, {2, 2}), lab.from({5, 6}, {2, 1}), {.alpha = -2},
         lab.from({1, 10}, {2, 1}));
  CHECK(Lab::values(d) == Values{-33, -68});
}

TEST_CASE("formula: QK-norm's epsilon and its weights by tensor, a bias on every row", "[formulas]") {
  Lab lab;
  // One token with two query heads and one key head, each with two elements so small that epsilon matters.
  const Tensor q = lab.from({3e-3, -4e-3, 0, 5e-3}, {1, 1, 2, 2}), k = lab.from({1e-3, 1e-3}, {1, 1, 1, 2});
  const Tensor q_normed = lab.empty({1, 1, 2, 2}), k_normed = lab.empty({1, 1, 1, 2});
  qk_norm_forward(lab.ctx(), {q_normed, k_normed}, {q, k}, lab.from({2, 5, -1, 7}, {4}), 1e-6);
  const double r = 1 / std::sqrt(12.5e-6 + 1e-6), r_k = 1 / std::sqrt(1e-6 + 1e-6);
  CHECK(largest_difference(Lab::values(q_normed), {6e-3 * r, -20e-3 * r, 0, 25e-3 * r}) < kTiny);
  CHECK(largest_difference(Lab::values(k_normed), {-1e-3 * r_k, 7e-3 * r_k}) < kTiny);

  const Tensor y = lab.empty({2, 3}), db = lab.from({1, 1, 1}, {3});
  linear_forward(lab.ctx(), y, lab.from({1, 2}, {2, 1}), lab.from({10, 20, 30}, {3, 1}),
                 repeat_row(lab.from({1, 2, 3}, {3}), 2));
  CHECK(Lab::values(y) == Values{11, 22, 33, 21, 42, 63});
  column_sum(lab.ctx(), db, y);
  CHECK(Lab::values(db) == Values{33, 65, 97});
}

TEST_CASE("random numbers: no two uses of a seed share a stream, and streams never change", "[formulas]") {
  std::vector<RandomStreams> all(kRandomStreams.begin(), kRandomStreams.end());
  for (size_t i = 0; i < all.size(); ++i) CHECK(static_cast<size_t>(all[i].use) == i);
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 1; i < all.size(); ++i) {
    INFO("uses " << static_cast<int>(all[i - 1].use) << " and " << static_cast<int>(all[i].use));
    CHECK(all[i].first - all[i - 1].first >= all[i - 1].count);
  }
  CHECK(all.back().first <= UINT64_MAX - all.back().count);
  // These values must never change, because all earlier runs drew their weights and data with them.
  CHECK(random_stream(RandomUse::init, 7) == 7);
  CHECK(random_stream(RandomUse::order, 3) == 0x6f72646572000003);
  CHECK(random_stream(RandomUse::synthetic, 1) == 0x746f6b656e000001);
  CHECK(random_stream(RandomUse::held_out_documents) == 0x73706c6974000000);
  CHECK(random_stream(RandomUse::held_out_strata) == 0x7374726174610000);
  CHECK(random_stream(RandomUse::needle_train, 5) == 0x6e65000000000005);
  CHECK(random_stream(RandomUse::needle_val, 5) == 0x6e66000000000005);
  CHECK(random_stream(RandomUse::needle_probe, 5) == 0x6e67000000000005);
  CHECK(random_stream(RandomUse::state_rounding, 5) == 0x7273000000000005);
  CHECK(random_stream(RandomUse::gradient_rounding, 5) == 0x7274000000000005);
}
