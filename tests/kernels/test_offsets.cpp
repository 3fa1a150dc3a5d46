// The ops other than attention on tensors with over 2^31 (f32) and 2^32 (bf16) elements, where 32-bit offsets overflow.
// Inputs repeat after a prime row count, so a wrong offset reads other values. Sampled rows (including the last ones)
// and whole sums are compared with plain double arithmetic on the host.
#include <array>
#include <optional>
#include <set>
#include <string>

#include "kernels/nsa/compress.h"
#include "kernels/nsa/gate.h"
#include "kernels/ops/activation.h"
#include "kernels/ops/cast.h"
#include "kernels/ops/cross_entropy.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/matmul_tuned.h"
#include "kernels/ops/rmsnorm.h"
#include "kernels/ops/rope.h"
#include "kernels/step/reduce.h"
#include "tests/support/large.h"

namespace {

using namespace triad;
using namespace triad::test;
using Floats = std::vector<float>;

constexpr int64_t kPeriod = 1009;  // rows; a prime

double tolerance(DType dtype) { return dtype == DType::bf16 ? 5e-3 : 2e-5; }

int64_t rows_past(DType dtype, int64_t columns) {
  return (dtype == DType::bf16 ? int64_t{1} << 32 : int64_t{1} << 31) / columns + 5;
}

// Calls body(runtime, dtype) twice for each dtype: in a dry run, which measures the memory, and in a real run. The body
// allocates and runs ops; it checks results unless the runtime is planning.
template <class Body>
void on_gpu(Body&& body) {
  if (!require_gpu()) return;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    INFO(name_of(dtype));
    const Runtime::Options options = memory_for([&](Runtime& plan) { body(plan, dtype); });
    if (!require_gpu_memory(options.arena_bytes)) return;
    Runtime rt(options);
    body(rt, dtype);
  }
}

// An input [N,C] whose row i is random row number i mod kPeriod, and these random rows on the host, rounded to dtype.
struct Input {
  Tensor tensor;
  Floats piece;

  Input(Runtime& rt, DType dtype, int64_t N, int64_t C, uint64_t stream, double std = 1)
      : tensor(allocate(rt, dtype, {N, C})) {
    if (rt.ctx().planning) return;
    repeat(rt.ctx(), tensor, draw(std::min(N, kPeriod) * C, stream, std));
    piece = fetch(rt.ctx(), tensor.slice(0, 0, std::min(N, kPeriod)));
  }
  const float* row(int64_t i) const { return &piece[i % kPeriod * tensor.size(1)]; }
  // Returns how many rows equal row i, for i < kPeriod.
  int64_t rows_like(int64_t i) const { return (tensor.size(0) - i + kPeriod - 1) / kPeriod; }
};

// Checks `got` [N,C] at both ends and around elements 2^31 and 2^32: row i must equal want(i) within `tolerance`.
template <class Want>
void check_rows(Runtime& rt, const Tensor& got, double tolerance, Want&& want) {
  const int64_t N = got.size(0), C = got.size(1);
  std::vector<int64_t> rows = {0, 1, N / 3, N - 2, N - 1};
  for (const int64_t limit : {int64_t{1} << 31, int64_t{1} << 32})
    for (int64_t i = limit / C - 1; i <= limit / C + 1 && i < N; ++i) rows.push_back(i);
  double worst = 0;
  for (const int64_t i : rows)
    worst = std::max(worst, Expected(want(i)).error_of(fetch(rt.ctx(), got.slice(0, i, i + 1)).data()));
  CHECK(worst < tolerance);
}

double silu(double x) { return x / (1 + std::exp(-x)); }
double silu_slope(double x) {
  const double s = 1 / (1 + std::exp(-x));
  return s * (1 + x * (1 - s));
}

}  // namespace

TEST_CASE("RMSNorm is right past 2^31 elements (GPU)", "[gpu][large]") {
  on_gpu([](Runtime& rt, DType dtype) {
    constexpr double kEps = 1e-6;
    const int64_t C = 3072, N = rows_past(dtype, C);
    const Input x(rt, dtype, N, C, 1), dy(rt, dtype, N, C, 2), w(rt, dtype, 1, C, 3);
    const Tensor y = poisoned(rt, dtype, {N, C}), rrms = poisoned(rt, DType::f32, {N});
    const Tensor dw = allocate(rt, DType::f32, {C});
    rmsnorm_forward(rt.ctx(), y, rrms, x.tensor, w.tensor[0], kEps);
    auto scale = [&](int64_t i) {
      return 1 / std::sqrt(product(x.row(i), x.row(i), C) / static_cast<double>(C) + kEps);
    };
    if (!rt.ctx().planning)
      check_rows(rt, y, tolerance(dtype), [&](int64_t i) {
        Expected want(C);
        for (int64_t j = 0; j < C; ++j) want.value[j] = x.row(i)[j] * scale(i) * w.row(0)[j];
        return want;
      });
    zero(rt.ctx(), dw);
    const Tensor dx = y;
    rmsnorm_backward(rt.ctx(), dx, dw, dy.tensor, x.tensor, w.tensor[0], rrms);
    if (rt.ctx().planning) return;
    check_rows(rt, dx, tolerance(dtype), [&](int64_t i) {
      const double r = scale(i);
      double sum = 0;
      for (int64_t j = 0; j < C; ++j) sum += static_cast<double>(dy.row(i)[j]) * x.row(i)[j] * w.row(0)[j];
      Expected want(C);
      for (int64_t j = 0; j < C; ++j)
        want.value[j] = r * (dy.row(i)[j] * w.row(0)[j] - x.row(i)[j] * r * r * sum / static_cast<double>(C));
      return want;
    });
    Expected want(C);
    for (int64_t i = 0; i < kPeriod; ++i) {
      const double factor = scale(i) * static_cast<double>(x.rows_like(i));
      for (int64_t j = 0; j < C; ++j) want.value[j] += factor * x.row(i)[j] * dy.row(i)[j];
    }
    CHECK(want.error_of(fetch(rt.ctx(), dw).data()) < 1e-4);
  });
}

TEST_CASE("SiLU, cast and sums are right past 2^31 elements (GPU)", "[gpu][large]") {
  on_gpu([](Runtime& rt, DType dtype) {
    const int64_t C = 3072, N = rows_past(dtype, C);
    const Input x(rt, dtype, N, C, 1), dy(rt, dtype, N, C, 2);
    const Tensor y = poisoned(rt, dtype, {N, C}), sums = allocate(rt, DType::f64, {2});
    silu_forward(rt.ctx(), y, x.tensor);
    if (!rt.ctx().planning)
      check_rows(rt, y, tolerance(dtype), [&](int64_t i) {
        Expected want(C);
        for (int64_t j = 0; j < C; ++j) want.value[j] = silu(x.row(i)[j]);
        return want;
      });
    silu_backward(rt.ctx(), y, dy.tensor, x.tensor);
    if (!rt.ctx().planning)
      check_rows(rt, y, tolerance(dtype), [&](int64_t i) {
        Expected want(C);
        for (int64_t j = 0; j < C; ++j) want.value[j] = dy.row(i)[j] * silu_slope(x.row(i)[j]);
        return want;
      });
    const Tensor other = poisoned(rt, dtype == DType::f32 ? DType::bf16 : DType::f32, {N, C});
    cast(rt.ctx(), other, x.tensor);
    sum(rt.ctx(), sums.slice(0, 0, 1), x.tensor);
    sum_of_squares(rt.ctx(), sums.slice(0, 1, 2), x.tensor);
    if (rt.ctx().planning) return;
    check_rows(rt, other, tolerance(DType::bf16), [&](int64_t i) {
      Expected want(C);
      want.add(1, x.row(i));
      return want;
    });
    double want[2] = {}, got[2] = {};
    for (int64_t i = 0; i < kPeriod; ++i)
      for (int64_t j = 0; j < C; ++j) {
        const double v = x.row(i)[j], count = static_cast<double>(x.rows_like(i));
        want[0] += count * v, want[1] += count * v * v;
      }
    read(rt.ctx(), got, sums);
    CHECK(std::abs(got[0] - want[0]) < 1e-6 * want[1]);
    CHECK(std::abs(got[1] - want[1]) < 1e-6 * want[1]);
  });
}

// Both the table and the output have more than 2^31 elements. Token i is i * 7919 mod N; 7919 is prime, so every token
// occurs once.
TEST_CASE("Embedding is right past 2^31 elements (GPU)", "[gpu][large]") {
  on_gpu([](Runtime& rt, DType dtype) {
    const int64_t C = 3072, N = rows_past(dtype, C);
    auto token = [N](int64_t i) { return i * 7919 % N; };
    const Input w(rt, dtype, N, C, 1);
    const Tensor tokens = allocate(rt, DType::i32, {N}), y = poisoned(rt, dtype, {N, C});
    std::vector<int32_t> values(static_cast<size_t>(N));
    for (int64_t i = 0; i < N; ++i) values[static_cast<size_t>(i)] = static_cast<int32_t>(token(i));
    write(rt.ctx(), tokens, values.data());
    embedding_forward(rt.ctx(), y, tokens, w.tensor);
    auto row_of = [&](int64_t i) {
      Expected want(C);
      want.add(1, w.row(i));
      return want;
    };
    if (!rt.ctx().planning) check_rows(rt, y, 1e-12, [&](int64_t i) { return row_of(token(i)); });
    const Tensor dw = allocate(rt, DType::f32, {N, C});
    zero(rt.ctx(), dw);
    embedding_backward(rt.ctx(), dw, y, tokens);  // dy = y, and every token occurs once, so dw is the table
    if (!rt.ctx().planning) check_rows(rt, dw, 1e-12, row_of);
  });
}

namespace {

// Checks y = x w^T over N rows and its gradients, including dw, which is a sum over all rows.
void check_linear(Runtime& rt, DType dtype, int64_t N, int64_t in, int64_t out) {
  const Input x(rt, dtype, N, in, 1), dy(rt, dtype, N, out, 2), w(rt, dtype, out, in, 3);
  const Tensor y = poisoned(rt, dtype, {N, out}), dx = poisoned(rt, dtype, {N, in});
  const Tensor dw = allocate(rt, DType::f32, {out, in});
  zero(rt.ctx(), dw);
  linear_forward(rt.ctx(), y, x.tensor, w.tensor);
  linear_backward(rt.ctx(), dx, dw, dy.tensor, x.tensor, w.tensor);
  if (rt.ctx().planning) return;
  check_rows(rt, y, tolerance(dtype), [&](int64_t i) {
    Expected want(out);
    for (int64_t o = 0; o < out; ++o) want.value[o] = product(x.row(i), w.row(o), in);
    return want;
  });
  check_rows(rt, dx, tolerance(dtype), [&](int64_t i) {
    Expected want(in);
    for (int64_t o = 0; o < out; ++o) want.add(dy.row(i)[o], w.row(o));
    return want;
  });
  const Floats got = fetch(rt.ctx(), dw);
  const double error = worst_of(out, [&](int64_t o) {
    Expected want(in);
    for (int64_t i = 0; i < kPeriod; ++i) want.add(static_cast<double>(x.rows_like(i)) * dy.row(i)[o], x.row(i));
    return want.error_of(&got[o * in]);
  });
  CHECK(error < 5e-4);  // each element sums a million products in fp32
}

}  // namespace

// In the first shape x has more than 2^31 elements, in the second y.
TEST_CASE("Linear layers are right past 2^31 elements (GPU)", "[gpu][large]") {
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{3072, 48}, {48, 3072}})
    on_gpu(
        [in = in, out = out](Runtime& rt, DType dtype) { check_linear(rt, dtype, rows_past(dtype, 3072), in, out); });
}

namespace {

// Checks y = x w^T + r over N rows.
void check_linear_addend(Runtime& rt, DType dtype, int64_t N, int64_t in, int64_t out) {
  const Input x(rt, dtype, N, in, 1), r(rt, dtype, N, out, 2), w(rt, dtype, out, in, 3);
  const Tensor y = poisoned(rt, dtype, {N, out});
  linear_forward(rt.ctx(), y, x.tensor, w.tensor, r.tensor);
  if (rt.ctx().planning) return;
  check_rows(rt, y, tolerance(dtype), [&](int64_t i) {
    Expected want(out);
    for (int64_t o = 0; o < out; ++o) want.value[o] = product(x.row(i), w.row(o), in) + r.row(i)[o];
    return want;
  });
}

// Returns how many products in this context took kernels/ops/matmul_tuned.h's algorithm.
int64_t measured_products(const Context& ctx) {
  int64_t calls = 0;
  for (const Routes::Count& c : ctx.routes.counts()) calls += c.kernel == "cublaslt measured" ? c.calls : 0;
  return calls;
}

}  // namespace

// Shapes for which kernels/ops/matmul_tuned.h chooses each algorithm it has, in bf16 on a card with 132 SMs. The last
// six shapes take one tile wave each, with tiles past both edges of y and dx.
TEST_CASE("Linear layers are right with the algorithms chosen by their sizes (GPU)", "[gpu][matmul]") {
  std::set<uint32_t> tiles;  // tiles in all algorithms that the shapes below choose
  for (const auto& [N, in, out] : {std::array<int64_t, 3>{16384, 768, 1536},
                                   {16401, 768, 768},
                                   {16384, 768, 3072},
                                   {20000, 3072, 768},
                                   {2048, 768, 50304},
                                   {4096, 768, 50304},
                                   {11 * 136 - 8, 1528, 1528},
                                   {11 * 144 - 8, 1528, 1528},
                                   {11 * 152 - 8, 1528, 1528},
                                   {11 * 160 - 8, 1528, 1528},
                                   {11 * 168 - 8, 1528, 1528},
                                   {11 * 176 - 8, 1528, 1528}})
    on_gpu([&, N = N, in = in, out = out](Runtime& rt, DType dtype) {
      INFO(N << " rows, " << in << " -> " << out);
      const auto has = [&](cuda::LinearPass pass) {
        const std::optional<cuda::TunedAlgorithm> algorithm = cuda::tuned_algorithm(pass, in, out, N);
        if (algorithm) tiles.insert(algorithm->tile);
        return algorithm ? 1 : 0;
      };
      const int forward = has(cuda::LinearPass::forward);
      const int all = forward + has(cuda::LinearPass::dx) + has(cuda::LinearPass::dw);
      const bool is_tuned = dtype == DType::bf16 && rt.ctx().may_use_sm90() && rt.ctx().num_sms == cuda::kTunedSms;
      REQUIRE(all > 0);
      check_linear(rt, dtype, N, in, out);
      CHECK(measured_products(rt.ctx()) == (is_tuned ? all : 0));
      check_linear_addend(rt, dtype, N, in, out);
      CHECK(measured_products(rt.ctx()) == (is_tuned ? all + forward : 0));
      CHECK(rt.ctx().routes.fallbacks() == 0);
    });
  if (tiles.empty()) return;  // there is no GPU
  for (const cuda::TunedProduct& product : cuda::kTunedProducts) CHECK(tiles.contains(product.algorithm.tile));
  for (const cuda::MatmulTile& tile : cuda::kTiles) CHECK(tiles.contains(tile.code));
  CHECK(tiles.contains(cuda::kClassifierTile.code));
}

namespace {

// Checks the loss and its gradient for logits [N,Vp], whose last 47 columns are padding. If one_pass is true,
// cross_entropy_forward_backward computes both; otherwise cross_entropy_forward and cross_entropy_backward do.
void check_cross_entropy(int64_t Vp, bool one_pass) {
  on_gpu([=](Runtime& rt, DType dtype) {
    const int64_t vocab = Vp - 47, N = rows_past(dtype, Vp);
    constexpr double kScale = 0.25;
    const Input logits(rt, dtype, N, Vp, 1, 3);
    const Tensor targets = allocate(rt, DType::i32, {N});
    const Tensor loss = poisoned(rt, DType::f32, {N, 1}), lse = poisoned(rt, DType::f32, {N, 1});
    std::vector<int32_t> target(static_cast<size_t>(N));
    for (int64_t i = 0; i < N; ++i) target[static_cast<size_t>(i)] = static_cast<int32_t>(i * 7919 % vocab);
    write(rt.ctx(), targets, target.data());
    // In place: the gradient overwrites the logits.
    if (one_pass) {
      cross_entropy_forward_backward(rt.ctx(), loss.view({N}), logits.tensor, logits.tensor, targets, vocab, kScale);
    } else {
      cross_entropy_forward(rt.ctx(), loss.view({N}), lse.view({N}), logits.tensor, targets, vocab);
      cross_entropy_backward(rt.ctx(), logits.tensor, logits.tensor, lse.view({N}), targets, vocab, kScale);
    }
    if (rt.ctx().planning) return;
    auto lse_of = [&](int64_t i) {
      double sum = 0;
      for (int64_t j = 0; j < vocab; ++j) sum += std::exp(static_cast<double>(logits.row(i)[j]));
      return std::log(sum);
    };
    const Floats losses = fetch(rt.ctx(), loss);
    double error = 0;
    for (const int64_t i : {int64_t{0}, N / 2, N - 2, N - 1})
      error = std::max(
          error, std::abs(losses[static_cast<size_t>(i)] - lse_of(i) + logits.row(i)[target[static_cast<size_t>(i)]]));
    CHECK(error < 1e-4);
    check_rows(rt, logits.tensor, tolerance(dtype), [&](int64_t i) {
      Expected want(Vp);
      const double row_lse = lse_of(i);
      for (int64_t j = 0; j < vocab; ++j) want.value[j] = kScale * std::exp(logits.row(i)[j] - row_lse);
      want.value[target[static_cast<size_t>(i)]] -= kScale;
      return want;
    });
  });
}

}  // namespace

TEST_CASE("Cross-entropy is right past 2^31 logits (GPU)", "[gpu][large]") { check_cross_entropy(50304, false); }

// On Hopper in bf16, one CTA holds a row with 50,304 logits in shared memory, and a CTA cluster one with 128,256. Other
// cards may compute a row with two kernels.
TEST_CASE("Cross-entropy in one pass is right past 2^31 logits (GPU)", "[gpu][large]") {
  for (const int64_t columns : {50304, 128256}) {
    INFO(columns << " columns");
    check_cross_entropy(columns, true);
  }
}

TEST_CASE("Rotation and compression are right past 2^31 elements (GPU)", "[gpu][large]") {
  on_gpu([](Runtime& rt, DType dtype) {
    constexpr double kTheta = 10000;
    const int64_t H = 16, D = 128, T = rows_past(dtype, H * D), l = 32, d = 16, Tc = compressed_length(T, l, d);
    const Input x(rt, dtype, T, H * D, 1), dy(rt, DType::f32, Tc, H * D, 2);
    const Tensor y = poisoned(rt, dtype, {T, H * D}), y_cmp = poisoned(rt, dtype, {Tc, H * D});
    const Tensor cos = allocate(rt, DType::f32, {T, D / 2}), sin = allocate(rt, DType::f32, {T, D / 2});
    const Shape shape = {1, T, H, D}, shape_cmp = {1, Tc, H, D};
    rope_table(rt.ctx(), cos, sin, D, {.theta = kTheta});
    rope_forward(rt.ctx(), y.view(shape), x.tensor.view(shape), cos, sin);
    auto turned = [&](int64_t t, double direction) {
      Expected want(H * D);
      for (int64_t i = 0; i < H * D; ++i) {
        const int64_t j = i % D % (D / 2);
        const double angle = direction * static_cast<double>(t) * std::pow(kTheta, -2.0 * j / static_cast<double>(D));
        const bool low = i % D < D / 2;
        const double other = x.row(t)[low ? i + D / 2 : i - D / 2];
        want.value[i] = x.row(t)[i] * std::cos(angle) + (low ? -other : other) * std::sin(angle);
      }
      return want;
    };
    if (!rt.ctx().planning) check_rows(rt, y, tolerance(dtype), [&](int64_t t) { return turned(t, 1); });
    rope_backward(rt.ctx(), y.view(shape), x.tensor.view(shape), cos, sin);
    if (!rt.ctx().planning) check_rows(rt, y, tolerance(dtype), [&](int64_t t) { return turned(t, -1); });

    nsa_compress_forward(rt.ctx(), y_cmp.view(shape_cmp), x.tensor.view(shape), {}, {l, d, Phi::avg});
    nsa_compress_backward(rt.ctx(), y.view(shape), {}, dy.tensor.view(shape_cmp), x.tensor.view(shape), {},
                          {l, d, Phi::avg});
    if (rt.ctx().planning) return;
    check_rows(rt, y_cmp, tolerance(dtype), [&](int64_t c) {
      Expected want(H * D);
      for (int64_t t = c * d; t < c * d + l; ++t) want.add(1.0 / static_cast<double>(l), x.row(t));
      return want;
    });
    check_rows(rt, y, tolerance(dtype), [&](int64_t t) {
      Expected want(H * D);
      for (int64_t c = std::max<int64_t>(0, (t - l + d) / d); c * d <= t && c < Tc; ++c)
        want.add(1.0 / static_cast<double>(l), dy.row(c));
      return want;
    });
  });
}

TEST_CASE("Gates are right past 2^31 elements (GPU)", "[gpu][large]") {
  on_gpu([](Runtime& rt, DType dtype) {
    const int64_t Hq = 16, Hkv = 2, G = Hq / Hkv, D = 128, hidden = D / 2, T = rows_past(dtype, Hq * D);
    const Input q(rt, dtype, T, Hq * D, 1), dgate(rt, DType::f32, 3 * T, Hkv, 2);
    const Input fc1_w(rt, dtype, hidden, D, 3, 0.3), fc1_b(rt, dtype, 1, hidden, 4),
        fc2_w(rt, dtype, 3, hidden, 5, 0.5), fc2_b(rt, dtype, 1, 3, 6);
    const GateWeights w = {fc1_w.tensor, fc1_b.tensor[0], fc2_w.tensor, fc2_b.tensor[0]};
    const GateGrads dw = {allocate(rt, DType::f32, {hidden, D}), allocate(rt, DType::f32, {hidden}),
                          allocate(rt, DType::f32, {3, hidden}), allocate(rt, DType::f32, {3})};
    for (const Tensor& t : {dw.fc1_w, dw.fc1_b, dw.fc2_w, dw.fc2_b}) zero(rt.ctx(), t);
    const Tensor gate = poisoned(rt, DType::f32, {3 * T, Hkv}), dq = poisoned(rt, DType::f32, {T, Hkv * D});
    const Shape planes = {3, 1, T, Hkv}, shape = {1, T, Hq, D};
    nsa_gate_forward(rt.ctx(), gate.view(planes), q.tensor.view(shape), w, {});
    nsa_gate_backward(rt.ctx(), dq.view({1, T, Hkv, D}), dw, dgate.tensor.view(planes), gate.view(planes),
                      q.tensor.view(shape), w, {});
    if (rt.ctx().planning) return;
    // Computes row t's gate in group g, forward and backward, on the host: three values, and what it adds to each
    // head's dq in the group.
    auto follow = [&](int64_t t, int64_t g, double(&gates)[3], Expected& dq_head) {
      Expected mean(D), dhidden(hidden);
      std::vector<double> a(static_cast<size_t>(hidden));
      for (int64_t i = 0; i < G; ++i) mean.add(1.0 / static_cast<double>(G), q.row(t) + (g * G + i) * D);
      for (int64_t i = 0; i < hidden; ++i) {
        a[i] = fc1_b.row(0)[i];
        for (int64_t j = 0; j < D; ++j) a[i] += fc1_w.row(i)[j] * mean.value[j];
      }
      double sum = 0, through = 0;
      for (int b = 0; b < 3; ++b) {
        double z = fc2_b.row(0)[b];
        for (int64_t i = 0; i < hidden; ++i) z += fc2_w.row(b)[i] * silu(a[i]);
        sum += gates[b] = std::exp(z);
      }
      for (int b = 0; b < 3; ++b) through += (gates[b] /= sum) * dgate.row(b * T + t)[g];
      for (int b = 0; b < 3; ++b) dhidden.add(gates[b] * (dgate.row(b * T + t)[g] - through), fc2_w.row(b));
      for (int64_t i = 0; i < hidden; ++i)
        dq_head.add(dhidden.value[i] * silu_slope(a[i]) / static_cast<double>(G), fc1_w.row(i));
    };
    check_rows(rt, dq, 1e-4, [&](int64_t t) {
      Expected want(Hkv * D);
      for (int64_t g = 0; g < Hkv; ++g) {
        double gates[3];
        Expected head(D);
        follow(t, g, gates, head);
        std::copy(head.value.begin(), head.value.end(), want.value.begin() + g * D);
      }
      return want;
    });
    check_rows(rt, gate, 1e-5, [&](int64_t row) {
      Expected want(Hkv);
      for (int64_t g = 0; g < Hkv; ++g) {
        double gates[3];
        Expected head(D);
        follow(row % T, g, gates, head);
        want.value[g] = gates[row / T];
      }
      return want;
    });
  });
}
