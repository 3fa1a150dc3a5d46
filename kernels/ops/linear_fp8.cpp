// Linear layers in e4m3: casts and products, and the CPU's products of the same values.
#include "kernels/ops/linear_fp8.h"

#include <fmt/format.h>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/parallel.h"
#include "kernels/common/route.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

// The values of e4m3 rows as T, in which they are exact.
template <class T>
void decode(Context& ctx, Tensor values, const E4m3Rows& rows) {
  const int64_t K = rows.q.size(1);
  parallel_for(ctx, rows.q.size(0), [&](int64_t i) {
    const float scale = rows.scale.ptr<float>()[i];
    const uint8_t* const from = rows.q.ptr<uint8_t>() + i * rows.q.stride[0];
    T* const to = values.ptr<T>() + i * K;
    for (int64_t k = 0; k < K; ++k) to[k] = static_cast<T>(from_e4m3(from[k]) * scale);
  });
}

// The values of a transpose as T.
template <class T>
void decode(Context& ctx, Tensor values, const E4m3Columns& columns) {
  const int64_t N = columns.q.size(1);
  const float scale = ctx.planning ? 1.0f : *columns.scale.ptr<float>();
  parallel_for(ctx, columns.q.size(0), [&](int64_t k) {
    const uint8_t* const from = columns.q.ptr<uint8_t>() + k * N;
    T* const to = values.ptr<T>() + k * N;
    for (int64_t n = 0; n < N; ++n) to[n] = static_cast<T>(from_e4m3(from[n]) * scale);
  });
}

template <class E4m3>
Tensor decoded(Context& ctx, Scratch::Scope& scope, const E4m3& rows, DType dtype) {
  const Tensor values = scope.alloc(dtype, rows.q.shape(), "values of e4m3");
  dtype == DType::f32 ? decode<float>(ctx, values, rows) : decode<bf16>(ctx, values, rows);
  return values;
}

}  // namespace

void matmul_fp8(Context& ctx, Tensor d, const E4m3Rows& a, const E4m3Rows& b, Fp8Sums sums, ConstTensor addend) {
  const OpScope op_scope(ctx, "matmul_fp8");
  TRIAD_CHECK(a.q.rank == 2 && b.q.rank == 2, "matmul_fp8: A {}, B {}", a.q.str(), b.q.str());
  const int64_t M = a.q.size(0), N = b.q.size(0), K = a.q.size(1);
  check_tensor("matmul_fp8's A", a.q, {M, K}, DType::u8);
  check_tensor("matmul_fp8's B", b.q, {N, K}, DType::u8);
  check_tensor("matmul_fp8's scales of A", a.scale, {M}, DType::f32);
  check_tensor("matmul_fp8's scales of B", b.scale, {N}, DType::f32);
  check_tensor("matmul_fp8's D", d, {M, N}, d.dtype);
  if (!addend.empty()) check_tensor("matmul_fp8's addend", addend, {M, N}, d.dtype);
  TRIAD_CHECK(d.dtype == DType::bf16 || (d.dtype == DType::f32 && !ctx.device.is_cuda()),
              "matmul_fp8: D {} is not in bf16 (or f32 on the CPU)", d.str());
  TRIAD_CHECK(K % kE4m3Multiple == 0 && N % kE4m3Multiple == 0,
              "matmul_fp8: A {} and B {}: rows of B and columns must be multiples of {}", a.q.str(), b.q.str(),
              kE4m3Multiple);
  if (M == 0) return;
  ctx.routes.set_call(d, a.q);
  if (ctx.device.is_cuda()) {
    ctx.routes.record("matmul_fp8", sums == Fp8Sums::fast ? "cublaslt e4m3 fast sums" : "cublaslt e4m3");
    if constexpr (kBuiltWithCuda) cuda::matmul_fp8(ctx, d, a, b, sums, addend);
    return;
  }
  ctx.routes.record("matmul_fp8", "cpu");
  Scratch::Scope scope(ctx.scratch);
  matmul(ctx, d, decoded(ctx, scope, a, d.dtype), decoded(ctx, scope, b, d.dtype), {.trans_b = true}, addend);
}

void matmul_fp8(Context& ctx, Tensor d, const E4m3Columns& a, const E4m3Columns& b, bool add) {
  const OpScope op_scope(ctx, "matmul_fp8");
  const int64_t M = a.q.size(0), N = b.q.size(0), K = a.q.size(1);
  check_tensor("matmul_fp8's transpose A", a.q, {M, K}, DType::u8);
  check_tensor("matmul_fp8's transpose B", b.q, {N, K}, DType::u8);
  check_tensor("matmul_fp8's D", d, {M, N}, DType::f32);
  TRIAD_CHECK(M % kE4m3Multiple == 0 && N % kE4m3Multiple == 0, "matmul_fp8: D {}: multiples of {} are needed", d.str(),
              kE4m3Multiple);
  if (K == 0) {
    if (!add) zero(ctx, d);
    return;
  }
  ctx.routes.set_call(d, a.q);
  if (ctx.device.is_cuda()) {
    ctx.routes.record("matmul_fp8", "cublaslt e4m3 dw");
    if constexpr (kBuiltWithCuda) cuda::matmul_fp8(ctx, d, a, b, add);
    return;
  }
  ctx.routes.record("matmul_fp8", "cpu");
  Scratch::Scope scope(ctx.scratch);
  matmul(ctx, d, decoded(ctx, scope, a, DType::f32), decoded(ctx, scope, b, DType::f32),
         {.trans_b = true, .accumulate = add});
}

bool fits_fp8(const ConstTensor& w) { return w.size(0) % kE4m3Multiple == 0 && w.size(1) % kE4m3Multiple == 0; }

void record_not_fp8(Context& ctx, const ConstTensor& y, const ConstTensor& w) {
  ctx.routes.set_call(y, w);
  ctx.routes.record("matmul_fp8", name_of(y.dtype), "rows or columns of the weight are no multiple of 16");
}

void linear_forward_fp8(Context& ctx, Tensor y, const E4m3Rows& x, ConstTensor w, ConstTensor addend, Tensor counts) {
  Scratch::Scope scope(ctx.scratch);
  const E4m3Rows rows = alloc_e4m3_rows(scope, w.size(0), w.size(1));
  cast_rows_e4m3(ctx, rows, w);
  if (!counts.empty()) count_e4m3(ctx, counts, rows);
  matmul_fp8(ctx, y, x, rows, Fp8Sums::fast, addend);
}

void linear_backward_input_fp8(Context& ctx, Tensor dx, const E4m3Rows& dy, ConstTensor w, Tensor counts) {
  Scratch::Scope scope(ctx.scratch);
  const E4m3Rows columns = alloc_e4m3_rows(scope, w.size(1), w.size(0));
  cast_columns_e4m3(ctx, columns, w);
  if (!counts.empty()) count_e4m3(ctx, counts, columns);
  matmul_fp8(ctx, dx, dy, columns, Fp8Sums::accurate);
}

void linear_backward_weight_fp8(Context& ctx, Tensor dw, const E4m3Rows& dy, const E4m3Rows& x, bool add,
                                const Tensor& unused) {
  Scratch::Scope scope(ctx.scratch);
  int64_t taken = 0;  // bytes of `unused`
  const auto alloc = [&](const E4m3Rows& rows) {
    const Shape shape = e4m3_columns_shape(rows);
    const int64_t end = taken + align_up(shape.numel());
    const bool fits = !unused.empty() && end <= unused.bytes();
    const Tensor q = fits ? Tensor(unused.data + taken, DType::u8, shape, unused.device)
                          : scope.alloc(DType::u8, shape, "e4m3 columns");
    if (fits) taken = end;
    return E4m3Columns{q, scope.alloc(DType::f32, {1}, "scale of e4m3 columns")};
  };
  const E4m3Columns dy_columns = alloc(dy), x_columns = alloc(x);
  transpose_e4m3(ctx, dy_columns, x_columns, dy, x);
  matmul_fp8(ctx, dw, dy_columns, x_columns, add);
}

std::string why_no_fp8(const Context& ctx) {
  if (!ctx.device.is_cuda()) return "";
  if constexpr (kBuiltWithCuda) {
    if (!cuda::built_with_fp8()) return "this program was built with a CUDA Toolkit before 12.9";
  }
  if (ctx.compute_capability == kFp8Capability) return "";
  return fmt::format("{} has compute capability {}.{}", ctx.device.str(), ctx.compute_capability / 10,
                     ctx.compute_capability % 10);
}

}  // namespace triad
