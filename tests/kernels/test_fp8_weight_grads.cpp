// Weight gradients in e4m3: transposes with one scale, byte by byte and the GPU's bits, and their products against f64.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/ops/linear_fp8.h"
#include "tests/support/device_lab.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Transposed {
  std::vector<uint8_t> q;
  float scale = 0;
  friend bool operator==(const Transposed& a, const Transposed& b) {
    return a.q == b.q && std::bit_cast<uint32_t>(a.scale) == std::bit_cast<uint32_t>(b.scale);
  }
};

// x [N,K] cast by rows, then transposed, on a device whose memory held other bytes before.
Transposed transpose(Device device, const Floats& x, int64_t N, int64_t K) {
  Lab lab(device);
  const E4m3Rows rows = {lab.alloc(DType::u8, {N, K}), lab.alloc(DType::f32, {N})};
  const E4m3Columns columns = {lab.alloc(DType::u8, {K, ceil_div(N, int64_t{16}) * 16}), lab.alloc(DType::f32, {1})};
  backend::fill(columns.q.data, device, 0x55, columns.q.bytes(), lab.ctx().stream.handle());
  cast_rows_e4m3(lab.ctx(), rows, lab.from(x, DType::bf16).view({N, K}));
  transpose_e4m3(lab.ctx(), columns, rows);
  return {lab.values<uint8_t>(columns.q), lab.values<float>(columns.scale)[0]};
}

// Rows whose sizes fall by a power of two each, down to 2^-39; some are zeros.
Floats falling_rows(int64_t N, int64_t K, uint64_t stream) {
  Floats x = normal(N * K, stream);
  for (int64_t i = 0; i < N * K; ++i)
    x[static_cast<size_t>(i)] *= i / K % 11 == 3 ? 0.0f : std::exp2(static_cast<float>(-(i / K % 40)));
  return x;
}

double distance(const Floats& a, const std::vector<double>& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) error += std::pow(a[i] - b[i], 2), size += b[i] * b[i];
  return std::sqrt(error / size);
}

// dw = dy^T x + dw on a device: against f64 sums of the bf16 operands, and of the values that the transposes have.
void check_weight_gradient(Device device) {
  constexpr int64_t kN = 75, kIn = 144, kOut = 96;  // 75 rows: the transposes have 5 zeros a row
  Lab lab(device);
  Scratch::Scope scope(lab.ctx().scratch);
  Floats x = normal(kN * kIn, 1), dy = normal(kN * kOut, 2, 1e-6);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::exp2(static_cast<float>(i / kIn % 7));
  for (size_t i = 0; i < dy.size(); ++i) dy[i] *= std::exp2(static_cast<float>(i / kOut % 5));
  const Tensor x_t = lab.from(x, DType::bf16).view({kN, kIn}), dy_t = lab.from(dy, DType::bf16).view({kN, kOut});
  x = lab.floats(x_t), dy = lab.floats(dy_t);
  const E4m3Rows x_rows = alloc_e4m3_rows(scope, kN, kIn), dy_rows = alloc_e4m3_rows(scope, kN, kOut);
  cast_rows_e4m3(lab.ctx(), x_rows, x_t);
  cast_rows_e4m3(lab.ctx(), dy_rows, dy_t);
  const Transposed xt = transpose(Device::cpu(), x, kN, kIn), dyt = transpose(Device::cpu(), dy, kN, kOut);
  const auto value = [](const Transposed& t, int64_t row, int64_t n) {
    constexpr int64_t padded = 80;
    return double{from_e4m3(t.q[static_cast<size_t>(row * padded + n)])} * double{t.scale};
  };
  std::vector<double> exact(kOut * kIn), of_e4m3(kOut * kIn);
  for (int64_t o = 0; o < kOut; ++o)
    for (int64_t i = 0; i < kIn; ++i)
      for (int64_t n = 0; n < kN; ++n) {
        const auto at = static_cast<size_t>(o * kIn + i);
        exact[at] += double{dy[static_cast<size_t>(n * kOut + o)]} * double{x[static_cast<size_t>(n * kIn + i)]};
        of_e4m3[at] += value(dyt, o, n) * value(xt, i, n);
      }
  const Tensor dw = lab.alloc(DType::f32, {kOut, kIn});
  linear_backward_weight_fp8(lab.ctx(), dw, dy_rows, x_rows, /*add=*/false);
  CHECK(distance(lab.floats(dw), of_e4m3) < 1e-5);
  CHECK(distance(lab.floats(dw), exact) < 0.045);
  linear_backward_weight_fp8(lab.ctx(), dw, dy_rows, x_rows, /*add=*/true);
  for (double& sum : of_e4m3) sum *= 2;
  CHECK(distance(lab.floats(dw), of_e4m3) < 1e-5);
}

}  // namespace

TEST_CASE("fp8: a transpose has the largest scale, values that keep their bits, and zeros past the last row", "[fp8]") {
  constexpr int64_t kN = 45, kK = 48, kPadded = 48;
  const Floats x = falling_rows(kN, kK, 3);
  Lab lab(Device::cpu());
  const E4m3Rows rows = {lab.alloc(DType::u8, {kN, kK}), lab.alloc(DType::f32, {kN})};
  cast_rows_e4m3(lab.ctx(), rows, lab.from(x, DType::bf16).view({kN, kK}));
  const std::vector<uint8_t> q = lab.values<uint8_t>(rows.q);
  const Floats scales = lab.values<float>(rows.scale);
  const Transposed t = transpose(Device::cpu(), x, kN, kK);
  CHECK(t.scale == *std::max_element(scales.begin(), scales.end()));
  int64_t kept = 0, flushed = 0;
  for (int64_t k = 0; k < kK; ++k)
    for (int64_t n = 0; n < kPadded; ++n) {
      const uint8_t byte = t.q[static_cast<size_t>(k * kPadded + n)];
      if (n >= kN) {
        REQUIRE(byte == 0);
        continue;
      }
      const double value = double{from_e4m3(q[static_cast<size_t>(n * kK + k)])} * scales[static_cast<size_t>(n)],
                   got = double{from_e4m3(byte)} * t.scale;
      INFO("row " << n << ", column " << k << ": " << value << " became " << got);
      if (std::abs(value) >= 0x1p-6 * t.scale) {  // normal e4m3
        REQUIRE(got == value);
        ++kept;
      } else {
        REQUIRE(std::abs(got - value) <= 0x1p-10 * t.scale);
        flushed += value != 0 && got == 0;
      }
    }
  CHECK(kept > 300);
  CHECK(flushed > 300);
}

TEST_CASE("fp8: a row that is NaN makes its transpose NaN", "[fp8]") {
  Floats x = normal(16 * 32, 4);
  x[5 * 32 + 7] = kNan;
  const Transposed t = transpose(Device::cpu(), x, 16, 32);
  CHECK(std::isnan(t.scale));
  CHECK(std::ranges::all_of(t.q, [](uint8_t byte) { return byte == kE4m3Nan; }));
}

TEST_CASE("fp8: weight gradients are the sums of the e4m3 values, within 4.5% of the operands'", "[fp8]") {
  check_weight_gradient(Device::cpu());
}

TEST_CASE("fp8: transposes and weight gradients on the GPU", "[fp8][gpu]") {
  if (!require_gpu()) return;
  struct Size {
    int64_t N, K;
  };
  for (const Size& s :
       std::initializer_list<Size>{{1, 16}, {45, 48}, {128, 128}, {257, 400}, {1000, 2064}, {4100, 768}}) {
    INFO(s.N << " x " << s.K);
    Floats x = falling_rows(s.N, s.K, 5);
    CHECK(transpose(Device::cuda(), x, s.N, s.K) == transpose(Device::cpu(), x, s.N, s.K));
    x[static_cast<size_t>(s.N * s.K / 2)] = kNan;
    CHECK(transpose(Device::cuda(), x, s.N, s.K) == transpose(Device::cpu(), x, s.N, s.K));
  }
  check_weight_gradient(Device::cuda());
}

TEST_CASE("fp8: transposes and weight gradients whose shapes do not fit are errors", "[fp8]") {
  Lab lab(Device::cpu());
  Scratch::Scope scope(lab.ctx().scratch);
  const E4m3Rows narrow = {lab.alloc(DType::u8, {8, 24}), lab.alloc(DType::f32, {8})},
                 rows = {lab.alloc(DType::u8, {8, 32}), lab.alloc(DType::f32, {8})};
  const E4m3Columns unpadded = {lab.alloc(DType::u8, {32, 8}), lab.alloc(DType::f32, {1})};
  check_error([&] { transpose_e4m3(lab.ctx(), alloc_e4m3_columns(scope, narrow), narrow); },
              {"[8,24]", "multiple of 16"});
  check_error([&] { transpose_e4m3(lab.ctx(), unpadded, rows); }, {"[32,8]", "[32,16]"});
  check_error(
      [&] {
        linear_backward_weight_fp8(lab.ctx(), lab.alloc(DType::f32, {32, 16}), rows, rows, true);
      },
      {"[32,16]", "[32,32]"});
}
