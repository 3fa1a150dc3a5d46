// Muon against its formula in plain loops in double: the Newton-Schulz iteration, the update for a buffer of matrices,
// and on a GPU the whole update against the CPU's.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "engine/rng.h"
#include "kernels/ops/cast.h"
#include "kernels/update/muon.h"
#include "kernels/update/newton_schulz.h"
#include "kernels/update/symmetric_product.h"
#include "tests/support/muon_reference.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

std::vector<double> normal(int64_t n, uint64_t stream) {
  std::vector<double> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(Philox(7, stream).normal(static_cast<uint64_t>(i)));
  return out;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    if (std::isnan(difference)) return HUGE_VAL;  // std::max() would ignore it
    largest = std::max(largest, difference);
  }
  return largest;
}

class Lab {
 public:
  explicit Lab(Device device) : rt_({.device = device, .arena_bytes = int64_t{32} << 20, .scratch_bytes = 8 << 20}) {}
  Context& ctx() { return rt_.ctx(); }
  Tensor from(const std::vector<double>& values, DType dtype, const Shape& shape) {
    const Tensor t = rt_.arena().alloc(MemTag::io, "values", dtype, shape);
    if (dtype == DType::f64) {
      write(ctx(), t, values.data());
    } else {
      const std::vector<float> narrow(values.begin(), values.end());
      write(ctx(), t, narrow.data());
    }
    return t;
  }
  Tensor from(const std::vector<double>& values, DType dtype) {
    return from(values, dtype, {static_cast<int64_t>(values.size())});
  }
  Tensor table(const MuonPlan& plan) {
    const auto rows = static_cast<int64_t>(plan.pieces().size());
    const Tensor t = rt_.arena().alloc(MemTag::io, "pieces", DType::i64, {rows, MuonPiece::kFields});
    write(ctx(), t, plan.pieces().data());
    return t;
  }
  std::vector<double> values(const Tensor& t) {
    if (t.dtype == DType::f64) {
      std::vector<double> all(static_cast<size_t>(t.numel()));
      read(ctx(), all.data(), t);
      return all;
    }
    std::vector<float> all(static_cast<size_t>(t.numel()));
    read(ctx(), all.data(), t);
    return {all.begin(), all.end()};
  }

 private:
  Runtime rt_;
};

}  // namespace

TEST_CASE("formula: the symmetric product is that of each matrix with its transpose, times alpha, plus the addend",
          "[formulas]") {
  const int64_t n = 3, side = 5, depth = 7;
  const std::vector<double> x = normal(n * side * depth, 8), one = normal(n * side * side, 9);
  std::vector<double> addend(one.size());  // symmetric
  for (int64_t m = 0; m < n; ++m)
    for (int64_t i = 0; i < side; ++i)
      for (int64_t j = 0; j < side; ++j)
        addend[static_cast<size_t>((m * side + i) * side + j)] =
            one[static_cast<size_t>((m * side + std::min(i, j)) * side + std::max(i, j))];
  for (const bool trans : {false, true})
    for (const bool added : {false, true}) {
      INFO("trans " << trans << ", addend " << added);
      std::vector<double> want;
      for (int64_t m = 0; m < n; ++m)
        for (int64_t i = 0; i < side; ++i)
          for (int64_t j = 0; j < side; ++j) {
            double sum = 0;
            for (int64_t k = 0; k < depth; ++k) {
              const auto at = [&](int64_t of) {
                return x[static_cast<size_t>(m * side * depth + (trans ? k * side + of : of * depth + k))];
              };
              sum += at(i) * at(j);
            }
            want.push_back(-0.5 * sum + (added ? addend[want.size()] : 0));
          }
      Lab lab(Device::cpu());
      const Tensor d = lab.from(one, DType::f64, {n, side, side});
      symmetric_product(lab.ctx(), d, lab.from(x, DType::f64, trans ? Shape{n, depth, side} : Shape{n, side, depth}),
                        {.trans = trans, .alpha = -0.5},
                        added ? lab.from(addend, DType::f64, {n, side, side}) : Tensor{});
      CHECK(largest_difference(lab.values(d), want) < 1e-12);
    }
}

TEST_CASE("formula: Newton-Schulz iterates the polynomial, for wide, tall and square matrices", "[formulas]") {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{5, 9}, {9, 5}, {7, 7}, {1, 4}, {40, 700}}) {
    INFO(rows << " x " << cols);
    Lab lab(Device::cpu());
    const std::vector<double> g = normal(3 * rows * cols, 1);
    std::vector<double> want;
    for (int64_t i = 0; i < 3; ++i) {
      const std::vector<double> one =
          newton_schulz_reference({g.begin() + i * rows * cols, g.begin() + (i + 1) * rows * cols}, rows, cols);
      want.insert(want.end(), one.begin(), one.end());
    }
    for (const DType dtype : {DType::f64, DType::f32}) {
      const Tensor x = lab.from(g, dtype, {3, rows, cols});
      newton_schulz(lab.ctx(), x);
      CHECK(largest_difference(lab.values(x), want) < (dtype == DType::f64 ? 1e-12 : 1e-4));
    }
  }
}

TEST_CASE("formula: Newton-Schulz maps each singular value by the polynomial alone", "[formulas]") {
  Lab lab(Device::cpu());
  const std::vector<double> singular = {3, 0.5, 1e-3, 4};
  const double norm = std::sqrt(9 + 0.25 + 1e-6 + 16);
  std::vector<double> g(4 * 6);
  for (size_t i = 0; i < 4; ++i) g[i * 6 + i] = singular[i];
  const Tensor x = lab.from(g, DType::f64, {1, 4, 6});
  newton_schulz(lab.ctx(), x);
  for (size_t i = 0; i < 4; ++i) {
    double s = singular[i] / norm;
    for (int k = 0; k < 5; ++k) s = 3.4445 * s - 4.7750 * std::pow(s, 3) + 2.0315 * std::pow(s, 5);
    g[i * 6 + i] = s;
  }
  CHECK(largest_difference(lab.values(x), g) < 1e-6);  // the norm has 1e-7 added
  for (const size_t i : {0, 1, 3}) CHECK(g[i * 6 + i] == Approx(1).margin(0.35));
}

TEST_CASE("formula: Muon updates each matrix of a buffer alone, with momentum, clip, scale and decay", "[formulas]") {
  // Two adjacent matrices with equal shapes, a tall one, and gaps (10 and 5 elements) that keep their values.
  const std::vector<MuonMatrix> matrices = {{110, 6, 9}, {164, 6, 9}, {228, 11, 4}};
  const int64_t first = 100, n = 177;
  for (const int64_t most : {int64_t{1}, MuonPlan::kMostElements}) {
    const MuonPlan plan(matrices, 1, most);
    CHECK(plan.batches().size() == (most == 1 ? 3 : 1));
    Lab lab(Device::cpu());
    std::vector<double> p = normal(n, 2), m(static_cast<size_t>(n), 0.25);
    const Tensor param = lab.from(p, DType::f64), moment = lab.from(m, DType::f64);
    for (int64_t step = 1; step <= 2; ++step) {
      const std::vector<double> g = normal(n, 10 + static_cast<uint64_t>(step));
      const MuonOptions o = {.lr = 0.02, .weight_decay = 0.1, .grad_clip = 1, .step = step, .first_element = first};
      const MuonTensors t = {.param = param,
                             .weights = {},
                             .m = moment,
                             .grad = lab.from(g, DType::f64),
                             .grad_norm_squared = lab.from({16}, DType::f64),
                             .pieces = lab.table(plan)};
      muon(lab.ctx(), plan, t, o);
      for (const MuonMatrix& matrix : matrices)
        muon_reference(p, m, g, matrix.element - first, matrix.rows, matrix.cols,
                       {.lr = 0.02, .momentum = 0.95, .weight_decay = 0.1, .clip = 1 / (4 + 1e-6)});
      CHECK(largest_difference(lab.values(param), p) < 1e-12);
      CHECK(largest_difference(lab.values(moment), m) < 1e-12);
      MuonTensors bad = t;
      for (const double norm_squared : {std::nan(""), HUGE_VAL}) {
        bad.grad_norm_squared = lab.from({norm_squared}, DType::f64);
        muon(lab.ctx(), plan, bad, o);
      }
      CHECK(largest_difference(lab.values(param), p) < 1e-12);
      CHECK(largest_difference(lab.values(moment), m) < 1e-12);
    }
  }
}

TEST_CASE("muon: ranks that iterate a share of the matrices each have the update of one rank", "[formulas]") {
  // Five with equal shapes, which three ranks divide into two, two and one, and two that all ranks iterate.
  std::vector<MuonMatrix> matrices;
  for (int64_t i = 0; i < 5; ++i) matrices.push_back({i * 48, 6, 8});
  matrices.insert(matrices.begin() + 2, {{240, 9, 4}, {276, 9, 4}});
  const int64_t n = 312, ranks = 3;
  const std::vector<double> before = normal(n, 5), g = normal(n, 6), zeros(static_cast<size_t>(n));
  const MuonPlan whole(matrices), shared(matrices, ranks);
  REQUIRE(shared.batches().size() == 1);
  const MuonPlan::Batch& batch = shared.batches()[0];
  CHECK(batch.part >= 2 * 48);
  std::vector<std::vector<double>> parts(ranks);  // what each rank has written in its part
  const auto update = [&](const MuonPlan& plan, int64_t rank, bool gathers) {
    Lab lab(Device::cpu());
    const Tensor param = lab.from(before, DType::f64);
    muon(lab.ctx(), plan,
         {.param = param,
          .weights = {},
          .m = lab.from(zeros, DType::f64),
          .grad = lab.from(g, DType::f64),
          .grad_norm_squared = lab.from({1}, DType::f64),
          .pieces = lab.table(plan)},
         {.lr = 0.1}, rank, [&](const Tensor& all) {
           const auto at = [&](int64_t r) { return all.slice(0, r * batch.part, (r + 1) * batch.part); };
           if (!gathers) parts[static_cast<size_t>(rank)] = lab.values(at(rank));
           for (int64_t r = 0; gathers && r < ranks; ++r) write(lab.ctx(), at(r), parts[static_cast<size_t>(r)].data());
         });
    return lab.values(param);
  };
  const std::vector<double> want = update(whole, 0, false);
  for (int64_t rank = 0; rank < ranks; ++rank) CHECK(update(shared, rank, false) != want);
  for (int64_t rank = 0; rank < ranks; ++rank) CHECK(update(shared, rank, true) == want);
}

TEST_CASE("muon: a GPU's update is the CPU's within the rounding of bf16, and repeats to the bit", "[formulas][gpu]") {
  if (!require_gpu()) return;
  // Two groups; the gradients have singular values within 3x.
  const std::vector<MuonMatrix> matrices = {{0, 64, 192}, {12288, 64, 192}, {24576, 256, 96}, {49152, 96, 96}};
  const MuonPlan plan(matrices);
  const int64_t n = 49152 + 96 * 96;
  std::vector<double> g = normal(n, 3);
  for (const MuonMatrix& m : matrices)
    for (int64_t i = 0; i < std::min(m.rows, m.cols); ++i)
      g[static_cast<size_t>(m.element + i * (m.cols + 1))] += 2 * (std::sqrt(m.rows) + std::sqrt(m.cols));
  const std::vector<double> before = normal(n, 4), zeros(static_cast<size_t>(n));
  const auto update = [&](Device device) {
    Lab lab(device);
    const Tensor param = lab.from(before, DType::f32);
    muon(lab.ctx(), plan,
         {.param = param,
          .weights = {},
          .m = lab.from(zeros, DType::f32),
          .grad = lab.from(g, DType::f32),
          .grad_norm_squared = lab.from({1}, DType::f64),
          .pieces = lab.table(plan)},
         {.lr = 1});
    std::vector<double> change = lab.values(param);
    for (size_t i = 0; i < change.size(); ++i) change[i] -= before[i];
    return change;
  };
  const std::vector<double> cpu = update(Device::cpu()), gpu = update(Device::cuda());
  CHECK(gpu == update(Device::cuda()));
  for (const MuonMatrix& m : matrices) {
    double error = 0, size = 0;
    for (int64_t i = m.element; i < m.element + m.size(); ++i) {
      const auto at = static_cast<size_t>(i);
      error += std::pow(gpu[at] - cpu[at], 2), size += std::pow(cpu[at], 2);
    }
    INFO(m.rows << " x " << m.cols << ": " << std::sqrt(error / size));
    CHECK(std::sqrt(error / size) < 0.03);
  }
}
