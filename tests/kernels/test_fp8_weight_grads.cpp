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
struct Transposes {
  Transposed a, b;
  friend bool operator==(const Transposes&, const Transposes&) = default;
};
// N rows of values.
struct Rows {
  Floats x;
  int64_t K;
};

// Casts a [N,a.K] and b [N,b.K] by rows, those of b 16 bytes apart, and transposes them, on a device whose memory held
// other bytes before.
Transposes transpose(Device device, const Rows& a, const Rows& b, int64_t N) {
  Lab lab(device);
  const auto alloc = [&](const Rows& rows, int64_t gap) {
    const E4m3Rows cast = {lab.alloc(DType::u8, {N, rows.K + gap}).slice(1, 0, rows.K), lab.alloc(DType::f32, {N})};
    cast_rows_e4m3(lab.ctx(), cast, lab.from(rows.x, DType::bf16).view({N, rows.K}));
    return cast;
  };
  const auto columns_of = [&](const E4m3Rows& rows) {
    const E4m3Columns columns = {lab.alloc(DType::u8, e4m3_columns_shape(rows)), lab.alloc(DType::f32, {1})};
    backend::fill(columns.q.data, device, 0x55, columns.q.bytes(), lab.ctx().stream.handle());
    return columns;
  };
  const E4m3Rows a_rows = alloc(a, 0), b_rows = alloc(b, 16);
  const E4m3Columns at = columns_of(a_rows), bt = columns_of(b_rows);
  transpose_e4m3(lab.ctx(), at, bt, a_rows, b_rows);
  return {{lab.values<uint8_t>(at.q), lab.values<float>(at.scale)[0]},
          {lab.values<uint8_t>(bt.q), lab.values<float>(bt.scale)[0]}};
}

struct Cast {
  std::vector<uint8_t> q;
  Floats scale;
};
Cast cast(const Rows& rows, int64_t N) {
  Lab lab(Device::cpu());
  const E4m3Rows cast = {lab.alloc(DType::u8, {N, rows.K}), lab.alloc(DType::f32, {N})};
  cast_rows_e4m3(lab.ctx(), cast, lab.from(rows.x, DType::bf16).view({N, rows.K}));
  return {lab.values<uint8_t>(cast.q), lab.values<float>(cast.scale)};
}

// Rows whose sizes fall by a power of two each, down to 2^-39; every eleventh is zeros.
Rows falling_rows(int64_t N, int64_t K, uint64_t stream) {
  Floats x = normal(N * K, stream);
  for (int64_t i = 0; i < N * K; ++i)
    x[static_cast<size_t>(i)] *= i / K % 11 == 3 ? 0.0f : std::exp2(static_cast<float>(-(i / K % 40)));
  return {x, K};
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
  // Rows of x up to 2^18 times as large as others have smaller dy; some dy are zeros.
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::exp2(static_cast<float>(i / kIn % 7 * 3));
  for (size_t i = 0; i < dy.size(); ++i)
    dy[i] *=
        i / kOut % 13 == 5 ? 0.0f : std::exp2(static_cast<float>(i / kOut % 2) - static_cast<float>(i / kOut % 7 * 3));
  const Tensor x_t = lab.from(x, DType::bf16).view({kN, kIn}), dy_t = lab.from(dy, DType::bf16).view({kN, kOut});
  x = lab.floats(x_t), dy = lab.floats(dy_t);
  const E4m3Rows x_rows = alloc_e4m3_rows(scope, kN, kIn), dy_rows = alloc_e4m3_rows(scope, kN, kOut);
  cast_rows_e4m3(lab.ctx(), x_rows, x_t);
  cast_rows_e4m3(lab.ctx(), dy_rows, dy_t);
  const Transposes t = transpose(Device::cpu(), {dy, kOut}, {x, kIn}, kN);
  const auto value = [](const Transposed& of, int64_t row, int64_t n) {
    constexpr int64_t padded = 80;
    return double{from_e4m3(of.q[static_cast<size_t>(row * padded + n)])} * double{of.scale};
  };
  std::vector<double> exact(kOut * kIn), of_e4m3(kOut * kIn);
  for (int64_t o = 0; o < kOut; ++o)
    for (int64_t i = 0; i < kIn; ++i)
      for (int64_t n = 0; n < kN; ++n) {
        const auto at = static_cast<size_t>(o * kIn + i);
        exact[at] += double{dy[static_cast<size_t>(n * kOut + o)]} * double{x[static_cast<size_t>(n * kIn + i)]};
        of_e4m3[at] += value(t.a, o, n) * value(t.b, i, n);
      }
  const double most = device.is_cuda() ? 2e-4 : 1e-5;  // tensor cores add a few terms to 14 bits: 8.7e-5 on an H200
  const Tensor dw = lab.alloc(DType::f32, {kOut, kIn});
  linear_backward_weight_fp8(lab.ctx(), dw, dy_rows, x_rows, /*add=*/false);
  CHECK(distance(lab.floats(dw), of_e4m3) < most);
  CHECK(distance(lab.floats(dw), exact) < 0.045);
  // The same with the transposes, or one of them, in memory of the caller.
  for (double& sum : of_e4m3) sum *= 2;
  for (const int64_t bytes : {int64_t{80} * (kOut + kIn) + 256, int64_t{80} * kOut}) {
    linear_backward_weight_fp8(lab.ctx(), dw, dy_rows, x_rows, /*add=*/false, lab.alloc(DType::u8, {bytes}));
    linear_backward_weight_fp8(lab.ctx(), dw, dy_rows, x_rows, /*add=*/true, lab.alloc(DType::u8, {bytes}));
    CHECK(distance(lab.floats(dw), of_e4m3) < most);
  }
}

}  // namespace

TEST_CASE("fp8: transposes bring rows to the largest product of two scales, and have zeros past the last row",
          "[fp8]") {
  constexpr int64_t kN = 45, kA = 48, kB = 32, kPadded = 48;
  const Rows a = falling_rows(kN, kA, 3), b = {normal(kN * kB, 4, 1e-5), kB};
  const Cast a_rows = cast(a, kN), b_rows = cast(b, kN);
  double largest = 0;
  for (size_t n = 0; n < kN; ++n)
    if (n % 11 != 3) largest = std::max(largest, double{a_rows.scale[n]} * double{b_rows.scale[n]});
  const Transposes t = transpose(Device::cpu(), a, b, kN);
  CHECK(double{t.a.scale} * double{t.b.scale} == largest);
  int64_t kept = 0, flushed = 0;
  for (int64_t n = 0; n < kPadded; ++n) {
    const auto check = [&](const Transposed& got, const Cast& rows, int64_t K, bool rounds_up) {
      for (int64_t k = 0; k < K; ++k) {
        const uint8_t byte = got.q[static_cast<size_t>(k * kPadded + n)];
        if (n >= kN) {
          REQUIRE(byte == 0);
          continue;
        }
        const auto row = static_cast<size_t>(n);
        const double below = std::log2(largest / (double{a_rows.scale[row]} * double{b_rows.scale[row]}));
        const double want = from_e4m3(rows.q[static_cast<size_t>(n * K + k)]) *
                            std::exp2(-(rounds_up ? std::ceil(below / 2) : std::floor(below / 2)));
        INFO("row " << n << ", column " << k << ": " << want << " became " << from_e4m3(byte));
        if (std::abs(want) >= 0x1p-6) {  // normal e4m3
          REQUIRE(from_e4m3(byte) == want);
          ++kept;
        } else {
          REQUIRE(std::abs(from_e4m3(byte) - want) <= 0x1p-10);
          flushed += want != 0 && byte == 0;
        }
      }
    };
    check(t.a, a_rows, kA, false);
    check(t.b, b_rows, kB, true);
  }
  CHECK(kept > 1000);
  CHECK(flushed > 300);
}

TEST_CASE("fp8: rows that are large in one operand and as small in the other lose nothing in their transposes",
          "[fp8]") {
  constexpr int64_t kN = 32, kK = 16;
  Floats a = normal(kN * kK, 5), b = normal(kN * kK, 6);
  for (int64_t i = 0; i < kN; ++i) a[static_cast<size_t>(i * kK)] = b[static_cast<size_t>(i * kK)] = 8;  // equal scales
  for (int64_t i = 0; i < kN * kK; ++i) {
    const float size = std::exp2(static_cast<float>(i / kK));
    a[static_cast<size_t>(i)] *= size, b[static_cast<size_t>(i)] /= size;
  }
  const Cast a_rows = cast({a, kK}, kN), b_rows = cast({b, kK}, kN);
  const Transposes t = transpose(Device::cpu(), {a, kK}, {b, kK}, kN);
  for (int64_t n = 0; n < kN; ++n)
    for (int64_t k = 0; k < kK; ++k) {
      REQUIRE(t.a.q[static_cast<size_t>(k * kN + n)] == a_rows.q[static_cast<size_t>(n * kK + k)]);
      REQUIRE(t.b.q[static_cast<size_t>(k * kN + n)] == b_rows.q[static_cast<size_t>(n * kK + k)]);
    }
}

TEST_CASE("fp8: a row that is NaN makes both transposes NaN", "[fp8]") {
  for (const bool in_a : {true, false}) {
    Floats a = normal(16 * 32, 4), b = normal(16 * 48, 5);
    (in_a ? a : b)[5 * 32 + 7] = kNan;
    const Transposes t = transpose(Device::cpu(), {a, 32}, {b, 48}, 16);
    for (const Transposed& each : {t.a, t.b}) {
      CHECK(std::isnan(each.scale));
      CHECK(std::ranges::all_of(each.q, [](uint8_t byte) { return byte == kE4m3Nan; }));
    }
  }
}

TEST_CASE("fp8: weight gradients are the sums of the e4m3 values, within 4.5% of the operands'", "[fp8]") {
  check_weight_gradient(Device::cpu());
}

TEST_CASE("fp8: transposes and weight gradients on the GPU", "[fp8][gpu]") {
  if (!require_gpu()) return;
  struct Size {
    int64_t N, a, b;
  };
  for (const Size& s : std::initializer_list<Size>{
           {1, 16, 32}, {45, 48, 16}, {128, 128, 256}, {257, 400, 48}, {1000, 2064, 128}, {9000, 768, 16}}) {
    INFO(s.N << " rows, " << s.a << " and " << s.b << " columns");
    Rows a = falling_rows(s.N, s.a, 5);
    const Rows b = falling_rows(s.N, s.b, 6);
    CHECK(transpose(Device::cuda(), a, b, s.N) == transpose(Device::cpu(), a, b, s.N));
    a.x[static_cast<size_t>(s.N * s.a / 2)] = kNan;
    CHECK(transpose(Device::cuda(), a, b, s.N) == transpose(Device::cpu(), a, b, s.N));
  }
  check_weight_gradient(Device::cuda());
}

TEST_CASE("fp8: transposes and weight gradients whose shapes do not fit are errors", "[fp8]") {
  Lab lab(Device::cpu());
  const auto rows_of = [&](int64_t N, int64_t K) {
    return E4m3Rows{lab.alloc(DType::u8, {N, K}), lab.alloc(DType::f32, {N})};
  };
  const auto columns_of = [&](int64_t K, int64_t N) {
    return E4m3Columns{lab.alloc(DType::u8, {K, N}), lab.alloc(DType::f32, {1})};
  };
  const E4m3Rows rows = rows_of(8, 32), narrow = rows_of(8, 24), longer = rows_of(9, 32);
  const E4m3Columns columns = columns_of(32, 16), unpadded = columns_of(32, 8), narrow_columns = columns_of(24, 16);
  const auto transposing = [&](const E4m3Columns& a, const E4m3Columns& b, const E4m3Rows& a_rows,
                               const E4m3Rows& b_rows) {
    return [&] { transpose_e4m3(lab.ctx(), a, b, a_rows, b_rows); };
  };
  check_error(transposing(narrow_columns, columns, narrow, rows), {"[8,24]", "multiple of 16"});
  check_error(transposing(columns, unpadded, rows, rows), {"[32,8]", "[32,16]"});
  check_error(transposing(columns, columns, rows, longer), {"[9,32]", "[8,32]"});
  const E4m3Rows wide = rows_of(8, 48), late = {wide.q.slice(1, 8, 40), wide.scale};
  check_error(transposing(columns, columns, rows, late), {"transpose_e4m3: B", "[8,32]", "begin at multiples of 16"});
  check_error(
      [&] {
        linear_backward_weight_fp8(lab.ctx(), lab.alloc(DType::f32, {32, 16}), rows, rows, true);
      },
      {"[32,16]", "[32,32]"});
}

TEST_CASE("fp8: a weight gradient over no rows is zero, or adds nothing", "[fp8]") {
  Lab lab(Device::cpu());
  const E4m3Rows none = {lab.alloc(DType::u8, {0, 16}), lab.alloc(DType::f32, {0})};
  const Tensor dw = lab.from(Floats(16 * 16, 3.0f), DType::f32).view({16, 16});
  linear_backward_weight_fp8(lab.ctx(), dw, none, none, /*add=*/true);
  CHECK(lab.floats(dw) == Floats(16 * 16, 3.0f));
  linear_backward_weight_fp8(lab.ctx(), dw, none, none, /*add=*/false);
  CHECK(lab.floats(dw) == Floats(16 * 16, 0.0f));
}
