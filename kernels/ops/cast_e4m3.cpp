// Casts to e4m3 and transposes on the CPU, which the GPU's equal bit for bit.
#include "kernels/ops/cast_e4m3.h"

#include <cmath>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/integer.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

uint32_t size_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// Casts a row of n elements, `step` apart, to bytes that are contiguous. Returns the scale.
template <class T>
float cast_row(uint8_t* q, const T* x, int64_t n, int64_t step) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, size_bits(static_cast<float>(x[i * step])));
  const uint32_t scale = e4m3_scale_bits(largest);
  const float inverse = std::bit_cast<float>(e4m3_inverse_bits(scale));
  for (int64_t i = 0; i < n; ++i) q[i] = to_e4m3(static_cast<float>(x[i * step]) * inverse);
  return std::bit_cast<float>(scale);
}

void check_rows(const char* op, const E4m3Rows& rows, int64_t N, int64_t K) {
  check_tensor(op, rows.q, {N, K}, DType::u8);
  check_tensor(op, rows.scale, {N}, DType::f32);
  TRIAD_CHECK((rows.q.stride[1] == 1 || K <= 1) && rows.scale.contiguous(), "{}: the columns of {} or {} are strided",
              op, rows.q.str(), rows.scale.str());
}

void check_input(const char* op, const ConstTensor& x, const Context& ctx) {
  TRIAD_CHECK(x.rank == 2 && (x.dtype == DType::bf16 || (x.dtype == DType::f32 && !ctx.device.is_cuda())),
              "{}: {} is no matrix in bf16 (or f32 on the CPU)", op, x.str());
  TRIAD_CHECK(x.stride[1] == 1 || x.size(1) <= 1, "{}: the columns of {} are {} apart", op, x.str(), x.stride[1]);
}

int exponent_of(float scale) { return static_cast<int>(std::bit_cast<uint32_t>(scale) >> 23); }
float scale_of(int exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23); }

void check_transpose(const char* what, const E4m3Columns& columns, const E4m3Rows& rows, int64_t N) {
  TRIAD_CHECK(rows.q.rank == 2 && rows.q.size(1) % kE4m3Multiple == 0,
              "transpose_e4m3: {}: columns in a multiple of {} are needed", rows.q.str(), kE4m3Multiple);
  check_tensor(what, rows.q, {N, rows.q.size(1)}, DType::u8);
  TRIAD_CHECK(rows.q.stride[1] == 1 && rows.q.stride[0] % kE4m3Multiple == 0 &&
                  reinterpret_cast<uintptr_t>(rows.q.data) % kE4m3Multiple == 0,
              "{}: {}: contiguous rows are needed that begin at multiples of {} bytes", what, rows.q.str(),
              kE4m3Multiple);
  check_tensor(what, rows.scale, {N}, DType::f32);
  check_tensor(what, columns.q, e4m3_columns_shape(rows), DType::u8);
  check_tensor(what, columns.scale, {1}, DType::f32);
}

// factor(n): what row n is multiplied by.
template <class Factor>
void transpose_cpu(Context& ctx, const E4m3Columns& columns, const E4m3Rows& rows, Factor&& factor) {
  const int64_t N = rows.q.size(0), padded = columns.q.size(1), stride = rows.q.stride[0];
  parallel_for(ctx, rows.q.size(1), [&](int64_t k) {
    const uint8_t* const from = rows.q.ptr<uint8_t>() + k;
    uint8_t* const to = columns.q.ptr<uint8_t>() + k * padded;
    for (int64_t n = 0; n < N; ++n) to[n] = to_e4m3(from_e4m3(from[n * stride]) * factor(n));
    std::fill(to + N, to + padded, uint8_t{0});
  });
}

template <class F>
void dispatch_input(DType dtype, F&& f) {
  return dtype == DType::f32 ? f.template operator()<float>() : f.template operator()<bf16>();
}

}  // namespace

void cast_rows_e4m3(Context& ctx, const E4m3Rows& rows, ConstTensor x) {
  const OpScope op_scope(ctx, "cast_rows_e4m3");
  check_input("cast_rows_e4m3", x, ctx);
  const int64_t N = x.size(0), K = x.size(1);
  check_rows("cast_rows_e4m3", rows, N, K);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::cast_rows_e4m3(ctx, rows, x);
  }
  dispatch_input(x.dtype, [&]<class T>() {
    parallel_for(ctx, N, [&](int64_t i) {
      rows.scale.ptr<float>()[i] =
          cast_row(rows.q.ptr<uint8_t>() + i * rows.q.stride[0], x.ptr<T>() + i * x.stride[0], K, 1);
    });
  });
}

void cast_columns_e4m3(Context& ctx, const E4m3Rows& columns, ConstTensor w) {
  const OpScope op_scope(ctx, "cast_columns_e4m3");
  check_input("cast_columns_e4m3", w, ctx);
  const int64_t M = w.size(0), K = w.size(1);
  TRIAD_CHECK(M % kE4m3Multiple == 0 && K % kE4m3Multiple == 0 && w.contiguous(),
              "cast_columns_e4m3: {}: contiguous rows and columns in multiples of {} are needed", w.str(),
              kE4m3Multiple);
  check_rows("cast_columns_e4m3", columns, K, M);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::cast_columns_e4m3(ctx, columns, w);
  }
  dispatch_input(w.dtype, [&]<class T>() {
    parallel_for(ctx, K, [&](int64_t j) {
      columns.scale.ptr<float>()[j] =
          cast_row(columns.q.ptr<uint8_t>() + j * columns.q.stride[0], w.ptr<T>() + j, M, K);
    });
  });
}

void count_e4m3(Context& ctx, Tensor counts, const E4m3Rows& rows) {
  const OpScope op_scope(ctx, "count_e4m3");
  TRIAD_CHECK(rows.q.rank == 2 && rows.q.size(1) % kE4m3Multiple == 0,
              "count_e4m3: {} has no columns in a multiple of {}", rows.q.str(), kE4m3Multiple);
  const int64_t N = rows.q.size(0), K = rows.q.size(1);
  check_rows("count_e4m3", rows, N, K);
  check_tensor("count_e4m3: counts", counts, {E4m3Counts::count}, DType::f64);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::count_e4m3(ctx, counts, rows);
  }
  parallel_for(ctx, 1, [&](int64_t) {
    for (int64_t i = 0; i < N; i += kE4m3CountedRows) {
      const uint8_t* const q = rows.q.ptr<uint8_t>() + i * rows.q.stride[0];
      const auto zeros = std::count_if(q, q + K, [](uint8_t x) { return (x & 0x7fu) == 0; });
      if (zeros == K) continue;
      double* const sums = counts.ptr<double>();
      sums[E4m3Counts::values] += static_cast<double>(K);
      sums[E4m3Counts::zeros] += static_cast<double>(zeros);
      sums[E4m3Counts::nans] +=
          static_cast<double>(std::count_if(q, q + K, [](uint8_t x) { return (x & 0x7fu) == kE4m3Nan; }));
    }
  });
}

Shape e4m3_columns_shape(const E4m3Rows& rows) {
  return {rows.q.size(1), round_up<int64_t>(rows.q.size(0), kE4m3Multiple)};
}

void transpose_e4m3(Context& ctx, const E4m3Columns& a, const E4m3Columns& b, const E4m3Rows& a_rows,
                    const E4m3Rows& b_rows) {
  const OpScope op_scope(ctx, "transpose_e4m3");
  const int64_t N = a_rows.q.size(0);
  check_transpose("transpose_e4m3: A", a, a_rows, N);
  check_transpose("transpose_e4m3: B", b, b_rows, N);
  if (N == 0) return;
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::transpose_e4m3(ctx, a, b, a_rows, b_rows);
  }
  if (ctx.planning) return;
  const float* const a_scales = a_rows.scale.ptr<float>();
  const float* const b_scales = b_rows.scale.ptr<float>();
  bool is_nan = false;
  int largest = 0;  // the sum of two scales' exponents
  for (int64_t n = 0; n < N; ++n) {
    is_nan = is_nan || std::isnan(a_scales[n]) || std::isnan(b_scales[n]);
    largest = std::max(largest, exponent_of(a_scales[n]) + exponent_of(b_scales[n]));
  }
  constexpr float kNan = std::bit_cast<float>(0x7fc00000u);
  *a.scale.ptr<float>() = is_nan ? kNan : scale_of(largest / 2);
  *b.scale.ptr<float>() = is_nan ? kNan : scale_of(largest - largest / 2);
  const auto below = [&](int64_t n) { return largest - exponent_of(a_scales[n]) - exponent_of(b_scales[n]); };
  transpose_cpu(ctx, a, a_rows, [&](int64_t n) { return is_nan ? kNan : std::ldexp(1.0f, -(below(n) / 2)); });
  transpose_cpu(ctx, b, b_rows, [&](int64_t n) { return is_nan ? kNan : std::ldexp(1.0f, below(n) / 2 - below(n)); });
}

}  // namespace triad
