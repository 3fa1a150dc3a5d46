// State in bf16: stochastic rounding, AdamW and gradient sums with it, and the ops that read gradients in bf16. Each
// check that names no device runs on the CPU, and on the GPU if there is one.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "engine/random_streams.h"
#include "kernels/common/stochastic.h"
#include "kernels/step/accumulate.h"
#include "kernels/step/per_param_norms.h"
#include "kernels/step/reduce.h"
#include "kernels/step/step_guard.h"
#include "kernels/update/adamw.h"
#include "tests/support/device_lab.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

double mean_of(const Floats& x) {
  double sum = 0;
  for (const float v : x) sum += v;
  return sum / static_cast<double>(x.size());
}

bf16 rounded(float x, uint32_t random) {
  bf16 y;
  y.bits = round_stochastically(std::bit_cast<uint32_t>(x), random);
  return y;
}

// AdamW's state for n parameters, all in one dtype.
struct State {
  Tensor param, m, v;
  State(Lab& lab, int64_t n, DType dtype)
      : param(lab.from(normal(n, 1), dtype)),
        m(lab.from(normal(n, 2, 0.1), dtype)),
        v(lab.from(Floats(static_cast<size_t>(n), 0.02f), dtype)) {}
  void update(Lab& lab, const Tensor& grad, double norm_squared, AdamWOptions o, int64_t begin, int64_t end) {
    o.first_element += begin;
    const auto of = [&](const Tensor& t) { return t.slice(0, begin, end); };
    adamw(lab.ctx(), of(param), {}, of(m), of(v), of(grad), lab.doubles({norm_squared}), o);
  }
  std::vector<uint16_t> bits(Lab& lab) const {
    std::vector<uint16_t> all;
    for (const Tensor& t : {param, m, v})
      for (const bf16 x : lab.values<bf16>(t)) all.push_back(x.bits);
    return all;
  }
};

constexpr AdamWOptions kOptions = {.lr = 1e-3, .weight_decay = 0.1, .grad_clip = 1, .step = 5, .seed = 77};

}  // namespace

TEST_CASE("small state: stochastic rounding is unbiased within five standard deviations", "[state]") {
  constexpr int64_t n = 1 << 18;
  for (const float x : {1.0f + 0x1p-10f, -3.0f - 0x1p-7f * 0.9f, 1e-20f * 1.2345f, 0x1.01p-130f, 1.0f + 0x1p-22f}) {
    const uint32_t low = std::bit_cast<uint32_t>(x) & 0xffffu;
    const double p = static_cast<double>(low) / 65536;  // probability that it rounds away from zero
    const float toward_zero = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xffff0000u);
    for (const uint64_t stream : {adamw_stream(1, AdamWTensor::param), adamw_stream(1, AdamWTensor::m)}) {
      StochasticRounder round(42, stream);
      int64_t away = 0;
      for (int64_t i = 0; i < n; ++i) away += static_cast<float>(round(x, i)) != toward_zero;
      const double deviation = std::sqrt(static_cast<double>(n) * p * (1 - p));
      INFO("x " << x << ": " << away << " of " << n << " are rounded away from zero, " << p * n << " expected");
      CHECK(std::abs(static_cast<double>(away) - p * static_cast<double>(n)) <= 5 * deviation + 1e-9);
    }
  }
}

TEST_CASE("small state: the bits of tensors, steps, elements and seeds are independent", "[state]") {
  constexpr int64_t n = 1 << 16;
  // Correlation between two sequences of 16-bit numbers; independent ones have a standard deviation of 1 / sqrt(n).
  const auto correlation = [&](auto&& a, auto&& b) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += (a(i) / 65536.0 - 0.5) * (b(i) / 65536.0 - 0.5) * 12;
    return std::abs(sum / n);
  };
  const auto of = [](uint64_t seed, int64_t step, AdamWTensor tensor, int64_t shift = 0) {
    return [bits = RoundingBits(seed, adamw_stream(step, tensor)), shift](int64_t i) { return bits.of(i + shift); };
  };
  const auto first = of(1, 1, AdamWTensor::param);
  const double limit = 5 / std::sqrt(static_cast<double>(n));
  CHECK(correlation(first, first) > 0.98);
  CHECK(correlation(first, of(1, 1, AdamWTensor::m)) < limit);
  CHECK(correlation(first, of(1, 1, AdamWTensor::v)) < limit);
  CHECK(correlation(first, of(1, 2, AdamWTensor::param)) < limit);
  CHECK(correlation(first, of(2, 1, AdamWTensor::param)) < limit);
  for (const int64_t shift : {1, 2, 7, 8}) CHECK(correlation(first, of(1, 1, AdamWTensor::param, shift)) < limit);
  // A block holds eight elements' bits in element order.
  const RoundingBits bits(1, 2);
  CHECK(bits.of(13) == bits.block(1).lane(5));
  CHECK(bits.block(1).lane(5) == (Philox(1, 2).block(1)[2] >> 16));
}

TEST_CASE("small state: stochastic rounding keeps bf16 values, infinities and NaN, and finite numbers finite",
          "[state]") {
  for (const uint32_t random : {0u, 1u, 0x8000u, 0xffffu}) {
    INFO("random bits " << random);
    bool kept = true;
    for (uint32_t b = 0; b < 0x10000; ++b) {
      bf16 x;
      x.bits = static_cast<uint16_t>(b);
      const float wide = x;
      kept = kept && (std::isnan(wide) ? std::isnan(static_cast<float>(rounded(wide, random)))
                                       : rounded(wide, random).bits == x.bits);
    }
    CHECK(kept);
    // NaN with a payload in the lower half alone, which the upper half would turn into infinity, and one whose sum with
    // the random bits overflows.
    for (const uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu})
      CHECK(std::isnan(static_cast<float>(rounded(std::bit_cast<float>(nan), random))));
    const float largest = std::numeric_limits<float>::max();
    CHECK(rounded(largest, random).bits == 0x7f7f);
    CHECK(rounded(-largest, random).bits == 0xff7f);
  }
  CHECK(rounded(1.0f + 0x1p-8f, 0x7fff).bits == bf16(1.0f).bits);
  CHECK(rounded(1.0f + 0x1p-8f, 0x8000).bits == bf16(1.0f + 0x1p-7f).bits);
}

TEST_CASE("small state: an update of the whole buffer and updates of its parts give the same bits", "[state]") {
  constexpr int64_t n = 5003;
  for (const Device device : devices()) {
    Lab lab(device);
    INFO(device.str());
    const Tensor grad = lab.from(normal(n, 3, 0.05), DType::bf16);
    State whole(lab, n, DType::bf16), again(lab, n, DType::bf16), other_seed(lab, n, DType::bf16),
        other_step(lab, n, DType::bf16);
    whole.update(lab, grad, 9.0, kOptions, 0, n);
    again.update(lab, grad, 9.0, kOptions, 0, n);
    CHECK(whole.bits(lab) == again.bits(lab));
    for (const int64_t cut : {int64_t{128}, int64_t{2048}, int64_t{1001}, n - 1}) {  // also inside a bit block
      State parts(lab, n, DType::bf16);
      parts.update(lab, grad, 9.0, kOptions, 0, cut);
      parts.update(lab, grad, 9.0, kOptions, cut, n);
      INFO("cut at " << cut);
      CHECK(parts.bits(lab) == whole.bits(lab));
    }
    AdamWOptions o = kOptions;
    o.seed = 78;
    other_seed.update(lab, grad, 9.0, o, 0, n);
    CHECK(other_seed.bits(lab) != whole.bits(lab));
    o = kOptions;
    o.first_element = 8;
    other_step.update(lab, grad, 9.0, o, 0, n);
    CHECK(other_step.bits(lab) != whole.bits(lab));
  }
}

TEST_CASE("small state: AdamW in bf16 is within one unit of the f32 result, on average equal to it", "[state]") {
  constexpr int64_t n = 1 << 16;
  for (const Device device : devices()) {
    Lab lab(device);
    INFO(device.str());
    // Equal state in both dtypes: bf16 values.
    State narrow(lab, n, DType::bf16), wide(lab, n, DType::f32);
    const Tensor grad = lab.from(normal(n, 3, 0.05), DType::bf16), wide_grad = lab.from(lab.floats(grad), DType::f32);
    cast(lab.ctx(), wide.param, narrow.param);
    cast(lab.ctx(), wide.m, narrow.m);
    cast(lab.ctx(), wide.v, narrow.v);
    narrow.update(lab, grad, 9.0, kOptions, 0, n);
    wide.update(lab, wide_grad, 9.0, kOptions, 0, n);
    const Tensor State::*tensors[] = {&State::param, &State::m, &State::v};
    for (const auto tensor : tensors) {
      const Floats got = lab.floats(narrow.*tensor), want = lab.floats(wide.*tensor);
      double sum = 0, squares = 0;
      bool near = true;
      for (size_t i = 0; i < got.size(); ++i) {
        const double difference = static_cast<double>(got[i]) - want[i];
        near = near && std::abs(difference) <= 0x1p-7 * std::abs(want[i]);
        sum += difference, squares += difference * difference;
      }
      CHECK(near);
      CHECK(std::abs(sum) <= 5 * std::sqrt(squares));
    }
  }
}

TEST_CASE("small state: AdamW changes nothing if the norm is not finite", "[state]") {
  for (const Device device : devices()) {
    Lab lab(device);
    INFO(device.str());
    State state(lab, 333, DType::bf16);
    const std::vector<uint16_t> before = state.bits(lab);
    const Tensor grad = lab.from(Floats(333, std::numeric_limits<float>::quiet_NaN()), DType::bf16);
    for (const double norm_squared : {std::nan(""), HUGE_VAL}) {
      state.update(lab, grad, norm_squared, kOptions, 0, 333);
      CHECK(state.bits(lab) == before);
    }
  }
}

TEST_CASE("small state: with beta2 0.999 a second moment in bf16 follows gradients that shrink", "[state]") {
  // v begins at 1, and every gradient is 0.1: v decays to 0.01. A step changes v by 0.1%. Rounded to nearest, v does
  // not move at all.
  constexpr int64_t n = 4096, steps = 3000;
  constexpr double beta2 = 0.999, g = 0.1;
  bf16 nearest(1.0f);
  double exact = 1;
  for (int64_t step = 0; step < steps; ++step) {
    nearest = bf16(static_cast<float>(beta2 * static_cast<float>(nearest) + (1 - beta2) * g * g));
    exact = beta2 * exact + (1 - beta2) * g * g;
  }
  CHECK(static_cast<float>(nearest) == 1.0f);
  Lab lab(Device::cpu());
  const Tensor param = lab.from(Floats(n, 0.0f), DType::f32), m = lab.from(Floats(n, 0.0f), DType::bf16),
               v = lab.from(Floats(n, 1.0f), DType::bf16), grad = lab.from(Floats(n, 0.1f), DType::f32),
               norm_squared = lab.doubles({1.0});
  for (int64_t step = 1; step <= steps; ++step)
    adamw(lab.ctx(), param, {}, m, v, grad, norm_squared, {.lr = 0, .beta2 = beta2, .step = step, .seed = 4});
  const Floats values = lab.floats(v);
  double squares = 0;
  for (const float x : values) squares += (x / exact - 1) * (x / exact - 1);
  const double scatter = std::sqrt(squares / n);
  INFO("v is " << mean_of(values) << " on average, exactly " << exact << "; relative scatter " << scatter);
  CHECK(std::abs(mean_of(values) / exact - 1) <= 5 * scatter / std::sqrt(static_cast<double>(n)));
  CHECK(scatter < 0.15);
  CHECK(mean_of(lab.floats(m)) == Approx(0.1).epsilon(0.01));
}

TEST_CASE("small state: weights in bf16 without master weights move by steps below their resolution", "[state]") {
  // Each step subtracts lr = 1e-4 from 1. Half a unit in bf16's last place below 1 is 2^-9, about 2e-3.
  constexpr int64_t n = 1 << 14, steps = 100;
  Lab lab(Device::cpu());
  const Tensor param = lab.from(Floats(n, 1.0f), DType::bf16), m = lab.from(Floats(n, 0.0f), DType::f32),
               v = lab.from(Floats(n, 0.0f), DType::f32), grad = lab.from(Floats(n, 0.1f), DType::f32),
               norm_squared = lab.doubles({1.0});
  for (int64_t step = 1; step <= steps; ++step)
    adamw(lab.ctx(), param, {}, m, v, grad, norm_squared, {.lr = 1e-4, .step = step, .seed = 5});
  const Floats values = lab.floats(param);
  double squares = 0;
  for (const float x : values) squares += (x - 0.99) * (x - 0.99);
  const double scatter = std::sqrt(squares / n);
  INFO("the mean is " << mean_of(values) << ", exactly 0.99; scatter " << scatter);
  CHECK(std::abs(mean_of(values) - 0.99) <= 5 * scatter / std::sqrt(static_cast<double>(n)));
  CHECK(scatter < 0x1p-7);
}

TEST_CASE("small state: sums of gradients in bf16 keep small addends, and parts give the same bits", "[state]") {
  constexpr int64_t n = 10007, addends = 200;
  std::vector<std::vector<bf16>> results;
  for (const Device device : devices()) {
    Lab lab(device);
    INFO(device.str());
    const Tensor sum = lab.from(Floats(n, 1.0f), DType::bf16), parts = lab.from(Floats(n, 1.0f), DType::bf16),
                 wide = lab.from(Floats(n, 1.0f), DType::f32), x = lab.from(Floats(n, 1e-3f), DType::f32);
    for (int64_t k = 0; k < addends; ++k) {
      const AccumulateOptions o = {.seed = 6, .micro_step = k, .first_element = 80};
      accumulate(lab.ctx(), sum, x, o);
      accumulate(lab.ctx(), wide, x, o);
      const int64_t cut = 8 * k + k % 3;
      AccumulateOptions later = o;
      later.first_element += cut;
      accumulate(lab.ctx(), parts.slice(0, 0, cut), x.slice(0, 0, cut), o);
      accumulate(lab.ctx(), parts.slice(0, cut, n), x.slice(0, cut, n), later);
    }
    const Floats got = lab.floats(sum), exact = lab.floats(wide);
    CHECK(exact.back() == Approx(1.2).epsilon(1e-5));
    double squares = 0;
    for (const float v : got) squares += (v - 1.2) * (v - 1.2);
    const double scatter = std::sqrt(squares / n);
    INFO("the mean is " << mean_of(got) << ", the scatter " << scatter);
    CHECK(std::abs(mean_of(got) - 1.2) <= 5 * scatter / std::sqrt(static_cast<double>(n)));
    CHECK(scatter < 0.05);  // ten times as much if an element had equal bits in all micro-steps
    results.push_back(lab.values<bf16>(sum));
    const auto same = [](const std::vector<bf16>& a, const std::vector<bf16>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16)) == 0;
    };
    CHECK(same(lab.values<bf16>(parts), results.back()));
    CHECK(same(results.front(), results.back()));  // the GPU's bits are the CPU's

    // What overwrites is rounded to nearest; an infinity and a NaN arrive.
    const float infinity = std::numeric_limits<float>::infinity();
    const Tensor odd = lab.from({1.0f + 0x1p-9f, infinity, std::nanf(""), -infinity}, DType::f32),
                 over = lab.from(Floats(4, 5.0f), DType::bf16), added = lab.from(Floats(4, 5.0f), DType::bf16);
    accumulate(lab.ctx(), over, odd, {.add = false});
    accumulate(lab.ctx(), added, odd, {});
    CHECK(lab.floats(over)[0] == 1.0f);
    for (const Tensor& t : {over, added}) {
      CHECK(lab.floats(t)[1] == infinity);
      CHECK(std::isnan(lab.floats(t)[2]));
      CHECK(lab.floats(t)[3] == -infinity);
    }
  }
}

TEST_CASE("small state: gradients in bf16 are judged and measured as their f32 copies are", "[state]") {
  constexpr int64_t n = 40000;
  Floats values = normal(n, 8);
  for (const bool finite : {true, false}) {
    if (!finite) values[20011] = std::numeric_limits<float>::infinity();
    for (const Device device : devices()) {
      Lab lab(device);
      INFO(device.str() << (finite ? ", finite" : ", one element infinite"));
      const Tensor narrow = lab.from(values, DType::bf16), wide = lab.from(lab.floats(narrow), DType::f32);
      // Three parameters' parts (the second begins at an odd element) and their pieces.
      const Tensor parts = lab.integers({0, 13, 13, 20000, 20013, n - 20013}, {3, 2});
      const Tensor pieces =
          lab.integers({0, 13, 13, kSumPiece, 13 + kSumPiece, 20000 - kSumPiece, 20013, n - 20013}, {4, 2});
      const Tensor first_piece = lab.integers({0, 1, 3, 4}, {4});
      std::vector<std::vector<double>> norms, numbers;
      std::vector<double> squares;
      for (const Tensor& grads : {narrow, wide}) {
        const Tensor out = lab.doubles(std::vector<double>(3 * ParamNorms::count, -1.0));
        per_param_norms(lab.ctx(), out.view({3, ParamNorms::count}), grads, pieces, first_piece);
        norms.push_back(lab.values<double>(out));
        const Tensor sum = lab.doubles({0.0});
        sum_of_squares(lab.ctx(), sum, grads);
        squares.push_back(lab.values<double>(sum)[0]);
        std::vector<double> step(StepNumbers::count, 0.0);
        step[StepNumbers::loss] = 1, step[StepNumbers::norm_squared] = squares.back();
        const Tensor judged = lab.doubles(step);
        judge_step(lab.ctx(), judged, grads, parts, {}, /*halt=*/false);
        numbers.push_back(lab.values<double>(judged));
      }
      const Floats host = lab.floats(narrow);
      const std::vector<int64_t> bounds = {0, 13, 20013, n};
      for (size_t i = 0; i < 3; ++i) {
        double expected = 0;
        for (int64_t j = bounds[i]; j < bounds[i + 1]; ++j) expected += std::pow(host[static_cast<size_t>(j)], 2.0);
        const bool bad = !finite && i == 1;
        for (const std::vector<double>& of : norms) {
          CHECK((bad ? std::isinf(of[i * ParamNorms::count]) : of[i * ParamNorms::count] == Approx(expected)));
          CHECK(of[i * ParamNorms::count + ParamNorms::not_finite] == bad);
        }
      }
      if (finite) CHECK(squares[0] == Approx(squares[1]));
      for (const std::vector<double>& judged : numbers) {
        CHECK(judged[StepNumbers::bad_part] == (finite ? -1 : 1));
        CHECK(std::isfinite(judged[StepNumbers::applied]) == finite);
      }
    }
  }
}
