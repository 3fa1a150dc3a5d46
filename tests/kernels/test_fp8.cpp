// Casts to e4m3 with scales for each row, and products of them: values one by one, the GPU's bits, sums against f64.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/ops/activation.h"
#include "kernels/ops/linear_fp8.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/rmsnorm.h"
#include "tests/support/device_lab.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// The nearest e4m3 by trying all; of two that are equally near, the one with an even byte.
uint8_t nearest_e4m3(float x) {
  int best = 0;
  double distance = std::numeric_limits<double>::infinity();
  for (int byte = 0; byte < kE4m3Nan; ++byte) {
    const double d =
        std::abs(std::abs(static_cast<double>(x)) - static_cast<double>(from_e4m3(static_cast<uint8_t>(byte))));
    if (d < distance || (d == distance && byte % 2 == 0)) best = byte, distance = d;
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

struct HostRows {
  std::vector<uint8_t> q;
  Floats scale;
  double value(int64_t row, int64_t k) const {
    const auto K = static_cast<int64_t>(q.size() / scale.size());
    return static_cast<double>(from_e4m3(q[static_cast<size_t>(row * K + k)])) *
           static_cast<double>(scale[static_cast<size_t>(row)]);
  }
  // NaN scales are equal too.
  friend bool operator==(const HostRows& a, const HostRows& b) {
    const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
    return a.q == b.q && std::ranges::equal(a.scale, b.scale, {}, bits, bits);
  }
};

E4m3Rows alloc_rows(Lab& lab, int64_t N, int64_t K) {
  return {lab.alloc(DType::u8, {N, K}), lab.alloc(DType::f32, {N})};
}
HostRows on_host(Lab& lab, const E4m3Rows& rows) {
  return {lab.values<uint8_t>(rows.q), lab.values<float>(rows.scale)};
}

// N rows of K values, `gap` elements between them, cast on a device.
HostRows cast_rows(Device device, DType dtype, const Floats& x, int64_t N, int64_t K, int64_t gap = 0) {
  Lab lab(device);
  Floats spread(static_cast<size_t>(N * (K + gap)), 1e30f);
  for (int64_t i = 0; i < N; ++i) std::copy_n(x.begin() + i * K, K, spread.begin() + i * (K + gap));
  const E4m3Rows rows = alloc_rows(lab, N, K);
  cast_rows_e4m3(lab.ctx(), rows, lab.from(spread, dtype).view({N, K + gap}).slice(1, 0, K));
  return on_host(lab, rows);
}

HostRows cast_columns(Device device, DType dtype, const Floats& w, int64_t M, int64_t K) {
  Lab lab(device);
  const E4m3Rows columns = alloc_rows(lab, K, M);
  cast_columns_e4m3(lab.ctx(), columns, lab.from(w, dtype).view({M, K}));
  return on_host(lab, columns);
}

Floats transposed(const Floats& w, int64_t M, int64_t K) {
  Floats t(w.size());
  for (int64_t i = 0; i < M; ++i)
    for (int64_t k = 0; k < K; ++k) t[static_cast<size_t>(k * M + i)] = w[static_cast<size_t>(i * K + k)];
  return t;
}

// Rows of every kind, of K values each: magnitudes from 1e-42 to 1e38, zeros, infinities, NaN, one large value.
Floats rows_of_every_kind(int64_t N, int64_t K, uint64_t stream) {
  Floats x = normal(N * K, stream);
  for (int64_t i = 0; i < N; ++i) {
    const auto row = x.begin() + i * K;
    const auto scale_by = [&](float factor) { std::for_each(row, row + K, [&](float& v) { v *= factor; }); };
    switch (i % 8) {
      case 1:
        std::fill(row, row + K, i % 16 == 1 ? 0.0f : -0.0f);
        break;
      case 2:
        scale_by(1e-38f);
        break;
      case 3:
        row[K / 2] = i % 16 == 3 ? kNan : -kInfinity;
        break;
      case 4:
        scale_by(1e37f);
        break;
      case 5:
        row[K - 1] = -3e4f;
        break;
      case 6:
        scale_by(1e-42f);
        break;
      default:
        break;
    }
  }
  return x;
}

// |a - b| / |b|.
double distance(const Floats& a, const std::vector<double>& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) error += std::pow(a[i] - b[i], 2), size += b[i] * b[i];
  return std::sqrt(error / size);
}

std::vector<double> product(int64_t M, int64_t N, int64_t K, auto&& a, auto&& b) {
  std::vector<double> d(static_cast<size_t>(M * N));
  for (int64_t i = 0; i < M; ++i)
    for (int64_t j = 0; j < N; ++j)
      for (int64_t k = 0; k < K; ++k) d[static_cast<size_t>(i * N + j)] += a(i, k) * b(j, k);
  return d;
}

// What count_e4m3() adds to {1, 2, 3} for these rows, cast on a device.
std::vector<double> counted(Device device, const Floats& x, int64_t N, int64_t K) {
  Lab lab(device);
  const E4m3Rows rows = alloc_rows(lab, N, K);
  cast_rows_e4m3(lab.ctx(), rows, lab.from(x, DType::bf16).view({N, K}));
  const Tensor counts = lab.doubles({1, 2, 3});
  count_e4m3(lab.ctx(), counts, rows);
  return lab.values<double>(counts);
}

void check_counts(Device device) {
  for (const auto& [N, K] : {std::pair{int64_t{400}, int64_t{48}}, {1, 16}, {17, 4112}}) {
    INFO(N << " rows of " << K);
    Floats x = rows_of_every_kind(N, K, 11);
    for (int64_t i = 0; i < N; i += 16) {  // another kind in each row that counts
      std::copy_n(x.begin() + i / 16 % std::min<int64_t>(N, 8) * K, K, x.begin() + i * K);
      if (i % 64 == 0) x[static_cast<size_t>(i * K + 3)] = 1e-30f;  // becomes 0
    }
    const HostRows rows = cast_rows(Device::cpu(), DType::bf16, x, N, K);
    std::vector<double> expected = {1, 2, 3};
    for (int64_t i = 0; i < N; i += 16) {
      const auto row = rows.q.begin() + i * K;
      const auto zeros = std::count_if(row, row + K, [](uint8_t q) { return from_e4m3(q) == 0; });
      if (zeros == K) continue;
      expected[0] += static_cast<double>(K), expected[1] += static_cast<double>(zeros);
      expected[2] +=
          static_cast<double>(std::count_if(row, row + K, [](uint8_t q) { return std::isnan(from_e4m3(q)); }));
    }
    CHECK(counted(device, x, N, K) == expected);
    if (N == 400) CHECK((expected[0] < 1 + 25 * K && expected[1] > 2 && expected[2] > 3));
  }
}

}  // namespace

TEST_CASE("fp8: a value becomes the nearest e4m3, ties the even one, and what is above 448 becomes 448", "[fp8]") {
  CHECK(from_e4m3(0x7e) == 448.0f);
  CHECK(from_e4m3(0x01) == 0x1p-9f);
  CHECK(from_e4m3(0x08) == 0x1p-6f);
  CHECK(std::isnan(from_e4m3(0xff)));
  for (int byte = 0; byte < 256; ++byte) {
    const auto its = static_cast<uint8_t>(byte);
    if ((its & kE4m3Nan) == kE4m3Nan) continue;
    INFO(byte);
    const float value = from_e4m3(its), next = from_e4m3(static_cast<uint8_t>(its + 1));
    CHECK(to_e4m3(value) == its);
    if (std::isnan(next) || its == 0x80) continue;
    const float middle = (value + next) / 2;
    for (const float x : {middle, std::nextafter(middle, value), std::nextafter(middle, next)})
      CHECK(to_e4m3(x) == nearest_e4m3(x));
  }
  for (const float x : normal(2000, 1)) CHECK(to_e4m3(x * 100) == nearest_e4m3(x * 100));
  for (const float x : {449.0f, 464.0f, 480.0f, 1e30f, kInfinity}) CHECK(to_e4m3(x) == 0x7e);
  CHECK(to_e4m3(-1e30f) == 0xfe);
  CHECK(to_e4m3(1e-40f) == 0);
  CHECK(to_e4m3(kNan) == kE4m3Nan);
}

TEST_CASE("fp8: values, zeros and NaN are counted in every 16th row, without rows of zeros", "[fp8]") {
  check_counts(Device::cpu());
}
TEST_CASE("fp8: the same values are counted on the GPU", "[fp8][gpu]") {
  if (!require_gpu()) return;
  check_counts(Device::cuda());
}

TEST_CASE("fp8: a row's scale is the smallest power of two for which its values fit", "[fp8]") {
  struct Row {
    float largest, scale;
  };
  const float above_448 = std::nextafter(448.0f, kInfinity), above_7 = std::nextafter(7.0f, kInfinity);
  for (const Row& row : std::initializer_list<Row>{{448, 1},
                                                   {above_448, 2},
                                                   {7, 0x1p-6f},
                                                   {above_7, 0x1p-5f},
                                                   {1, 0x1p-8f},
                                                   {0, 0x1p-124f},
                                                   {1e-40f, 0x1p-124f},
                                                   {0x1.cp-116f, 0x1p-124f},
                                                   {std::nextafter(0x1.cp-116f, 1.0f), 0x1p-123f},
                                                   {std::numeric_limits<float>::max(), 0x1p120f}}) {
    INFO(row.largest);
    for (const float sign : {1.0f, -1.0f}) {
      const HostRows cast = cast_rows(Device::cpu(), DType::f32, {0, row.largest / 3, sign * row.largest, 0}, 1, 4);
      CHECK(cast.scale[0] == row.scale);
      CHECK(cast.q[0] == 0);
      CHECK(cast.q[2] == nearest_e4m3(sign * row.largest / row.scale));
      CHECK(cast.q[1] == nearest_e4m3(row.largest / 3 / row.scale));
    }
  }
  for (const float bad : {kInfinity, -kInfinity, kNan}) {
    const HostRows cast = cast_rows(Device::cpu(), DType::f32, {0, 1, bad, 2}, 2, 2);
    CHECK(cast.scale[0] == 0x1p-8f);
    CHECK(std::isnan(cast.scale[1]));
    CHECK(cast.q[2] == kE4m3Nan);
    CHECK(cast.q[3] == kE4m3Nan);
  }
}

TEST_CASE("fp8: the cast of a weight's columns is that of its transpose's rows", "[fp8]") {
  constexpr int64_t kM = 48, kK = 80;
  const Floats w = rows_of_every_kind(kM, kK, 2);
  Floats finite = w;
  for (float& x : finite) x = std::isfinite(x) ? x : 0.5f;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Floats& values : {w, finite})
      CHECK(cast_columns(Device::cpu(), dtype, values, kM, kK) ==
            cast_rows(Device::cpu(), dtype, transposed(values, kM, kK), kK, kM));
  Lab lab(Device::cpu());
  const E4m3Rows rows = alloc_rows(lab, 24, 16), columns = alloc_rows(lab, 16, 24);
  const Tensor narrow = lab.alloc(DType::bf16, {24, 16});
  check_error([&] { cast_columns_e4m3(lab.ctx(), columns, narrow); }, {"[24,16]", "multiples of 16"});
  check_error([&] { cast_rows_e4m3(lab.ctx(), rows, lab.alloc(DType::f64, {24, 16})); }, {"f64", "bf16"});
  check_error([&] { cast_rows_e4m3(lab.ctx(), columns, narrow); }, {"[16,24]"});
}

TEST_CASE("fp8: casts have the CPU's bits on the GPU", "[fp8][gpu]") {
  if (!require_gpu()) return;
  struct Size {
    int64_t N, K, gap;
  };
  for (const Size& s : std::initializer_list<Size>{{64, 16, 0},
                                                   {64, 24, 0},
                                                   {33, 50, 1},
                                                   {40, 768, 8},
                                                   {40, 2048, 0},
                                                   {40, 4112, 0},
                                                   {40, 8192, 16},
                                                   {24, 16400, 0},
                                                   {16, 28672, 0},
                                                   {16, 40000, 0}}) {
    INFO(s.N << " x " << s.K << ", " << s.gap << " apart");
    const Floats x = rows_of_every_kind(s.N, s.K, 3);
    CHECK(cast_rows(Device::cuda(), DType::bf16, x, s.N, s.K, s.gap) ==
          cast_rows(Device::cpu(), DType::bf16, x, s.N, s.K, s.gap));
  }
  for (const auto& [M, K] : {std::pair<int64_t, int64_t>{16, 16}, {48, 272}, {336, 64}, {1040, 528}}) {
    INFO(M << " x " << K);
    Floats w = rows_of_every_kind(M, K, 4);
    for (const bool finite : {false, true}) {
      if (finite)
        std::ranges::replace_if(
            w, [](float v) { return !std::isfinite(v); }, 0.5f);
      CHECK(cast_columns(Device::cuda(), DType::bf16, w, M, K) == cast_columns(Device::cpu(), DType::bf16, w, M, K));
    }
  }
}

namespace {

// y = x w^T + addend and dx = dy w on a device, against f64 sums of the e4m3 values and of the bf16 operands. most: the
// distance to the former.
void check_products(Device device, DType dtype, double most) {
  constexpr int64_t kN = 67, kIn = 144, kOut = 96;
  Lab lab(device);
  // Rows and columns differ in size, so that a scale of another row is seen.
  Floats x = normal(kN * kIn, 5), w = normal(kOut * kIn, 6, 0.02), dy = normal(kN * kOut, 7, 1e-6);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::exp2(static_cast<float>(i / kIn % 7));
  for (size_t i = 0; i < dy.size(); ++i) dy[i] *= std::exp2(static_cast<float>(i / kOut % 5));
  for (size_t i = 0; i < w.size(); ++i) w[i] *= std::exp2(static_cast<float>(i / kIn % 3 + i % kIn % 4));
  const Tensor x_t = lab.from(x, dtype).view({kN, kIn}), w_t = lab.from(w, dtype).view({kOut, kIn}),
               dy_t = lab.from(dy, dtype).view({kN, kOut});
  x = lab.floats(x_t), w = lab.floats(w_t), dy = lab.floats(dy_t);
  const auto cast = [&](const Tensor& t) {
    const E4m3Rows rows = alloc_rows(lab, t.size(0), t.size(1));
    cast_rows_e4m3(lab.ctx(), rows, t);
    return rows;
  };
  const E4m3Rows x_rows = cast(x_t), dy_rows = cast(dy_t);
  const Tensor y = lab.alloc(dtype, {kN, kOut}), dx = lab.alloc(dtype, {kN, kIn});
  const Floats bias = normal(kOut, 8), added = normal(kN * kOut, 9);
  const Tensor bias_t = lab.from(bias, dtype), added_t = lab.from(added, dtype).view({kN, kOut});
  const HostRows xq = cast_rows(device, dtype, x, kN, kIn), dyq = cast_rows(device, dtype, dy, kN, kOut);
  const HostRows wq = cast_rows(device, dtype, w, kOut, kIn), wq_columns = cast_columns(device, dtype, w, kOut, kIn);
  const auto of = [](const HostRows& rows) { return [&rows](int64_t i, int64_t k) { return rows.value(i, k); }; };
  const auto at = [](const Floats& values, int64_t K) {
    return [&values, K](int64_t i, int64_t k) { return double{values[static_cast<size_t>(i * K + k)]}; };
  };
  const std::vector<double> exact = product(kN, kOut, kIn, of(xq), of(wq));
  linear_forward_fp8(lab.ctx(), y, x_rows, w_t);
  CHECK(distance(lab.floats(y), exact) < most);
  CHECK(distance(lab.floats(y), product(kN, kOut, kIn, at(x, kIn), at(w, kIn))) < 0.045);

  const auto plus = [&](const Floats& values, bool repeated) {
    std::vector<double> sums = exact;
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[repeated ? i % kOut : i];
    return sums;
  };
  linear_forward_fp8(lab.ctx(), y, x_rows, w_t, repeat_row(bias_t, kN));
  CHECK(distance(lab.floats(y), plus(lab.floats(bias_t), true)) < most);
  linear_forward_fp8(lab.ctx(), y, x_rows, w_t, added_t);
  CHECK(distance(lab.floats(y), plus(lab.floats(added_t), false)) < most);

  linear_backward_input_fp8(lab.ctx(), dx, dy_rows, w_t);
  CHECK(distance(lab.floats(dx), product(kN, kIn, kOut, of(dyq), of(wq_columns))) < most);
  const Floats wt = transposed(w, kOut, kIn);
  CHECK(distance(lab.floats(dx), product(kN, kIn, kOut, at(dy, kOut), at(wt, kOut))) < 0.045);
}

// A NaN in a row of x or of w reaches every result that depends on it, and no other.
void check_nan(Device device) {
  constexpr int64_t kN = 4, kIn = 32, kOut = 48, kBadRow = 2, kBadOut = 5;
  Lab lab(device);
  Floats x = normal(kN * kIn, 10), w = normal(kOut * kIn, 11);
  x[kBadRow * kIn + 3] = kInfinity, w[kBadOut * kIn + 7] = kNan;
  const Tensor y = lab.alloc(DType::bf16, {kN, kOut});
  const E4m3Rows rows = alloc_rows(lab, kN, kIn);
  cast_rows_e4m3(lab.ctx(), rows, lab.from(x, DType::bf16).view({kN, kIn}));
  linear_forward_fp8(lab.ctx(), y, rows, lab.from(w, DType::bf16).view({kOut, kIn}));
  const Floats got = lab.floats(y);
  for (int64_t i = 0; i < kN; ++i)
    for (int64_t j = 0; j < kOut; ++j)
      CHECK(std::isnan(got[static_cast<size_t>(i * kOut + j)]) == (i == kBadRow || j == kBadOut));
}

}  // namespace

TEST_CASE("fp8: products are those of the e4m3 values, within 4.5% of the operands'", "[fp8]") {
  check_products(Device::cpu(), DType::f32, 1e-6);
  check_products(Device::cpu(), DType::bf16, 3e-3);
  check_nan(Device::cpu());
}

TEST_CASE("fp8: products on the GPU are those of the e4m3 values, within 4.5% of the operands'", "[fp8][gpu]") {
  if (!require_gpu()) return;
  check_products(Device::cuda(), DType::bf16, 3e-3);
  check_nan(Device::cuda());
}

TEST_CASE("fp8: a product whose shapes or dtypes do not fit is an error", "[fp8]") {
  Lab lab(Device::cpu());
  const E4m3Rows a = alloc_rows(lab, 3, 32), b = alloc_rows(lab, 16, 32), narrow = alloc_rows(lab, 8, 32);
  const auto multiply = [&](const Tensor& d, const E4m3Rows& left, const E4m3Rows& right) {
    return [&lab, d, &left, &right] { matmul_fp8(lab.ctx(), d, left, right, Fp8Sums::fast); };
  };
  check_error(multiply(lab.alloc(DType::f32, {3, 8}), a, narrow), {"[8,32]", "multiples of 16"});
  check_error(multiply(lab.alloc(DType::f32, {3, 32}), a, b), {"[3,32]", "[3,16]"});
  check_error(multiply(lab.alloc(DType::f64, {3, 16}), a, b), {"f64", "bf16"});
  CHECK(fits_fp8(lab.alloc(DType::f32, {48, 16})));
  CHECK(!fits_fp8(lab.alloc(DType::f32, {48, 24})));
  CHECK(!fits_fp8(lab.alloc(DType::f32, {40, 16})));
}

namespace {

// Norm and activations that write e4m3: the bytes that the ops and cast_rows_e4m3() give, and the same other results.
void check_producers(Device device, DType dtype, int64_t N, int64_t C) {
  INFO(device.str() << " " << name_of(dtype) << " " << N << " x " << C);
  Lab lab(device);
  Context& ctx = lab.ctx();
  const auto filled = [&](int64_t columns, uint64_t stream) {
    return lab.from(rows_of_every_kind(N, columns, stream), dtype).view({N, columns});
  };
  const auto plain = [&](int64_t columns) { return lab.alloc(dtype, {N, columns}); };
  const auto cast_of = [&](const Tensor& x) {
    const E4m3Rows rows = alloc_rows(lab, N, x.size(1));
    cast_rows_e4m3(ctx, rows, x);
    return on_host(lab, rows);
  };
  const auto bytes = [&](const Tensor& t) {
    std::vector<uint8_t> host(static_cast<size_t>(t.bytes()));
    read(ctx, host.data(), t);
    return host;
  };
  const Tensor x = filled(C, 20), w = lab.from(normal(C, 21), dtype), y = plain(C);
  const Tensor rrms = lab.alloc(DType::f32, {N}), rrms_of_e4m3 = lab.alloc(DType::f32, {N});
  const E4m3Rows one = alloc_rows(lab, N, C);
  rmsnorm_forward(ctx, y, rrms, x, w, 1e-5);
  rmsnorm_forward_e4m3(ctx, one, rrms_of_e4m3, x, w, 1e-5);
  CHECK(on_host(lab, one) == cast_of(y));
  CHECK(bytes(rrms) == bytes(rrms_of_e4m3));

  silu_forward(ctx, y, x);
  silu_forward_e4m3(ctx, one, x);
  CHECK(on_host(lab, one) == cast_of(y));
  const Tensor pre = filled(2 * C, 22), gate = pre.slice(1, 0, C), up = pre.slice(1, C, 2 * C);
  swiglu_forward(ctx, y, gate, up);
  swiglu_forward_e4m3(ctx, one, gate, up);
  CHECK(on_host(lab, one) == cast_of(y));

  // Backward's two results, in memory of their own or in the rows of the activation's input.
  const Tensor dy = filled(C, 23), dx = plain(C), dpre = plain(2 * C);
  const auto check_in_place = [&](const Tensor& input, int64_t width, const Tensor& want, auto&& op) {
    const int64_t row = input.size(1) * size_of(dtype);
    const Tensor memory(input.data, DType::u8, {N, row}, input.device);
    const E4m3Rows grad = {memory.slice(1, 0, width), lab.alloc(DType::f32, {N})},
                   act = {memory.slice(1, width, width + C), lab.alloc(DType::f32, {N})};
    op(grad, act);
    const std::vector<uint8_t> all = bytes(memory);
    const auto on_host_in_place = [&](const E4m3Rows& rows, int64_t begin) {
      HostRows host = {{}, lab.values<float>(rows.scale)};
      for (int64_t i = 0; i < N; ++i)
        host.q.insert(host.q.end(), all.begin() + i * row + begin, all.begin() + i * row + begin + rows.q.size(1));
      return host;
    };
    CHECK(on_host_in_place(grad, 0) == cast_of(want));
    CHECK(on_host_in_place(act, width) == cast_of(y));
  };
  const auto check_both = [&](const Tensor& input, int64_t width, const Tensor& want, auto&& op) {
    const E4m3Rows grad = alloc_rows(lab, N, width), act = alloc_rows(lab, N, C);
    op(grad, act);
    CHECK(on_host(lab, grad) == cast_of(want));
    CHECK(on_host(lab, act) == cast_of(y));
    check_in_place(input, width, want, op);
  };
  swiglu_backward(ctx, dpre.slice(1, 0, C), dpre.slice(1, C, 2 * C), dy, gate, up, y);
  check_both(pre, 2 * C, dpre,
             [&](const E4m3Rows& grad, const E4m3Rows& act) { swiglu_backward_e4m3(ctx, grad, act, dy, pre); });
  silu_backward(ctx, dx, dy, x, y);
  check_both(x, C, dx, [&](const E4m3Rows& grad, const E4m3Rows& act) { silu_backward_e4m3(ctx, grad, act, dy, x); });
}

}  // namespace

TEST_CASE("fp8: norm and activations in e4m3 are the casts of their results", "[fp8]") {
  check_producers(Device::cpu(), DType::f32, 17, 48);
  check_producers(Device::cpu(), DType::bf16, 17, 50);
}

TEST_CASE("fp8: norm and activations in e4m3 are the casts of their results on the GPU", "[fp8][gpu]") {
  if (!require_gpu()) return;
  for (const int64_t C : {48, 50, 768, 2048, 4112, 8192, 14336, 16400})
    check_producers(Device::cuda(), DType::bf16, C > 8192 ? 6 : 17, C);
}
