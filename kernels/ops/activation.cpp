// SiLU and SwiGLU on the CPU, in loops that vectorise. An output may be the same tensor as an input.
#include "kernels/ops/activation.h"

#include <algorithm>
#include <utility>

#include "engine/op_scope.h"
#include "kernels/common/cpu_exp.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

// The derivative of silu at x, given s = sigmoid(x).
template <class A>
A silu_slope(A x, A s) {
  return s * (A{1} + x * (A{1} - s));
}

// Calls body(...) for every row i, with a pointer to row i of each tensor; the pointer is null for an absent tensor.
template <class T, class Body, class... Tensors>
void for_each_row(Context& ctx, int64_t rows, Body&& body, const Tensors&... t) {
  parallel_for(ctx, rows, [&](int64_t i) { body((t.empty() ? nullptr : t.template ptr<T>() + i * t.stride[0])...); });
}

void check_matrix(const char* op, const ConstTensor& x) {
  TRIAD_CHECK(x.rank == 2, "{}: {} is not a matrix", op, x.str());
}

}  // namespace

void silu_forward(Context& ctx, Tensor y, ConstTensor x) {
  const OpScope op_scope(ctx, "silu_forward");
  check_matrix("silu", x);
  check_tensor("silu: y", y, x.shape(), x.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::silu_forward(ctx, y, x);
  }
  const int64_t H = x.size(1);
  dispatch_float(x.dtype, [&]<class T>() {
    using A = acc_t<T>;
    const auto row = [H](T* y_row, const T* x_row) {
#pragma omp simd
      for (int64_t j = 0; j < H; ++j) {
        const A v = static_cast<A>(x_row[j]);
        y_row[j] = static_cast<T>(v * sigmoid_of(v));
      }
    };
    for_each_row<T>(ctx, x.size(0), row, y, x);
  });
}

void silu_backward(Context& ctx, Tensor dx, ConstTensor dy, ConstTensor x, Tensor y) {
  const OpScope op_scope(ctx, "silu_backward");
  check_matrix("silu backward", x);
  check_tensor("silu backward: dx", dx, x.shape(), x.dtype);
  check_tensor("silu backward: dy", dy, x.shape(), x.dtype);
  if (!y.empty()) check_tensor("silu backward: y", y, x.shape(), x.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::silu_backward(ctx, dx, dy, x, y);
  }
  const int64_t H = x.size(1);
  dispatch_float(x.dtype, [&]<class T>() {
    using A = acc_t<T>;
    const auto row = [H](T* dx_row, const T* dy_row, const T* x_row, T* y_row) {
#pragma omp simd
      for (int64_t j = 0; j < H; ++j) {
        const A v = static_cast<A>(x_row[j]), s = sigmoid_of(v);
        dx_row[j] = static_cast<T>(static_cast<A>(dy_row[j]) * silu_slope(v, s));
        if (y_row != nullptr) y_row[j] = static_cast<T>(v * s);
      }
    };
    for_each_row<T>(ctx, x.size(0), row, dx, dy, x, y);
  });
}

void swiglu_forward(Context& ctx, Tensor y, ConstTensor gate, ConstTensor up) {
  const OpScope op_scope(ctx, "swiglu_forward");
  check_matrix("swiglu", gate);
  check_tensor("swiglu: up", up, gate.shape(), gate.dtype);
  check_tensor("swiglu: y", y, gate.shape(), gate.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::swiglu_forward(ctx, y, gate, up);
  }
  const int64_t H = gate.size(1);
  dispatch_float(gate.dtype, [&]<class T>() {
    using A = acc_t<T>;
    const auto row = [H](T* y_row, const T* gate_row, const T* up_row) {
#pragma omp simd
      for (int64_t j = 0; j < H; ++j) {
        const A g = static_cast<A>(gate_row[j]);
        y_row[j] = static_cast<T>(g * sigmoid_of(g) * static_cast<A>(up_row[j]));
      }
    };
    for_each_row<T>(ctx, gate.size(0), row, y, gate, up);
  });
}

void swiglu_backward(Context& ctx, Tensor dgate, Tensor dup, ConstTensor dy, ConstTensor gate, ConstTensor up,
                     Tensor y) {
  const OpScope op_scope(ctx, "swiglu_backward");
  check_matrix("swiglu backward", gate);
  check_tensor("swiglu backward: up", up, gate.shape(), gate.dtype);
  check_tensor("swiglu backward: dy", dy, gate.shape(), gate.dtype);
  check_tensor("swiglu backward: dgate", dgate, gate.shape(), gate.dtype);
  check_tensor("swiglu backward: dup", dup, gate.shape(), gate.dtype);
  if (!y.empty()) check_tensor("swiglu backward: y", y, gate.shape(), gate.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::swiglu_backward(ctx, dgate, dup, dy, gate, up, y);
  }
  const int64_t H = gate.size(1);
  dispatch_float(gate.dtype, [&]<class T>() {
    using A = acc_t<T>;
    const auto row = [H](T* dgate_row, T* dup_row, const T* dy_row, const T* gate_row, const T* up_row, T* y_row) {
#pragma omp simd
      for (int64_t j = 0; j < H; ++j) {
        const A g = static_cast<A>(gate_row[j]), u = static_cast<A>(up_row[j]), d = static_cast<A>(dy_row[j]),
                s = sigmoid_of(g);
        dgate_row[j] = static_cast<T>(d * u * silu_slope(g, s));
        dup_row[j] = static_cast<T>(d * g * s);
        if (y_row != nullptr) y_row[j] = static_cast<T>(g * s * u);
      }
    };
    for_each_row<T>(ctx, gate.size(0), row, dgate, dup, dy, gate, up, y);
  });
}

namespace {

// Whether `fused` ran, which returns false for what its kernel does not support: rows of more than kFusedCastColumns,
// or tensors that are not aligned. Only bf16 on a GPU has such kernels.
template <class Fused>
bool runs_fused_cast(const Context& ctx, const ConstTensor& x, [[maybe_unused]] Fused&& fused) {
  const bool may = ctx.device.is_cuda() && x.dtype == DType::bf16;
  if constexpr (kBuiltWithCuda) return may && fused();
  return may && x.size(1) <= kFusedCastColumns;  // a plan without the kernels takes it that tensors are aligned
}

// Calls call(begin, end) for rows that are computed to scratch memory and cast, so many at a time that their
// temporaries of row_bytes each are a small part of an MLP's memory.
template <class Call>
void for_each_cast(int64_t rows, int64_t row_bytes, Call&& call) {
  constexpr int64_t kMostBytes = int64_t{32} << 20;
  const int64_t most = std::max<int64_t>(kMostBytes / std::max<int64_t>(row_bytes, 1), 1);
  for (int64_t begin = 0; begin < rows; begin += most) call(begin, std::min(begin + most, rows));
}

E4m3Rows rows_of(const E4m3Rows& all, int64_t begin, int64_t end) {
  return {all.q.slice(0, begin, end), all.scale.slice(0, begin, end)};
}

void check_cast(const char* op, const E4m3Rows& cast, const ConstTensor& rows, int64_t parts) {
  check_tensor(op, cast.q, {rows.size(0), parts * rows.size(1)}, DType::u8);
  check_tensor(op, cast.scale, {rows.size(0)}, DType::f32);
}

std::pair<ConstTensor, ConstTensor> halves(const ConstTensor& pre) {
  const int64_t H = pre.size(1) / 2;
  return {pre.slice(1, 0, H), pre.slice(1, H, 2 * H)};
}
std::pair<Tensor, Tensor> halves(const Tensor& pre) {
  const int64_t H = pre.size(1) / 2;
  return {pre.slice(1, 0, H), pre.slice(1, H, 2 * H)};
}

}  // namespace

void silu_forward_e4m3(Context& ctx, const E4m3Rows& y, ConstTensor x) {
  const OpScope op_scope(ctx, "silu_forward_e4m3");
  check_matrix("silu_forward_e4m3", x);
  check_cast("silu_forward_e4m3", y, x, 1);
  if (runs_fused_cast(ctx, x, [&] { return cuda::silu_forward_e4m3(ctx, y, x); })) return;
  for_each_cast(x.size(0), x.size(1) * size_of(x.dtype), [&](int64_t begin, int64_t end) {
    Scratch::Scope scope(ctx.scratch);
    const Tensor values = scope.alloc(x.dtype, {end - begin, x.size(1)}, "activation");
    silu_forward(ctx, values, x.slice(0, begin, end));
    cast_rows_e4m3(ctx, rows_of(y, begin, end), values);
  });
}

void swiglu_forward_e4m3(Context& ctx, const E4m3Rows& y, ConstTensor gate, ConstTensor up) {
  const OpScope op_scope(ctx, "swiglu_forward_e4m3");
  check_matrix("swiglu_forward_e4m3", gate);
  check_tensor("swiglu_forward_e4m3: up", up, gate.shape(), gate.dtype);
  check_cast("swiglu_forward_e4m3", y, gate, 1);
  if (runs_fused_cast(ctx, gate, [&] { return cuda::swiglu_forward_e4m3(ctx, y, gate, up); })) return;
  for_each_cast(gate.size(0), gate.size(1) * size_of(gate.dtype), [&](int64_t begin, int64_t end) {
    Scratch::Scope scope(ctx.scratch);
    const Tensor values = scope.alloc(gate.dtype, {end - begin, gate.size(1)}, "activation");
    swiglu_forward(ctx, values, gate.slice(0, begin, end), up.slice(0, begin, end));
    cast_rows_e4m3(ctx, rows_of(y, begin, end), values);
  });
}

void silu_backward_e4m3(Context& ctx, const E4m3Rows& dx, const E4m3Rows& y, ConstTensor dy, ConstTensor x) {
  const OpScope op_scope(ctx, "silu_backward_e4m3");
  check_matrix("silu_backward_e4m3", x);
  check_tensor("silu_backward_e4m3: dy", dy, x.shape(), x.dtype);
  check_cast("silu_backward_e4m3: dx", dx, x, 1);
  check_cast("silu_backward_e4m3: y", y, x, 1);
  if (runs_fused_cast(ctx, x, [&] { return cuda::silu_backward_e4m3(ctx, dx, y, dy, x); })) return;
  for_each_cast(x.size(0), 2 * x.size(1) * size_of(x.dtype), [&](int64_t begin, int64_t end) {
    Scratch::Scope scope(ctx.scratch);
    const Shape shape = {end - begin, x.size(1)};
    const Tensor dx_values = scope.alloc(x.dtype, shape, "gradient of the activation"),
                 y_values = scope.alloc(x.dtype, shape, "activation");
    silu_backward(ctx, dx_values, dy.slice(0, begin, end), x.slice(0, begin, end), y_values);
    cast_rows_e4m3(ctx, rows_of(dx, begin, end), dx_values);
    cast_rows_e4m3(ctx, rows_of(y, begin, end), y_values);
  });
}

void swiglu_backward_e4m3(Context& ctx, const E4m3Rows& dpre, const E4m3Rows& y, ConstTensor dy, ConstTensor pre) {
  const OpScope op_scope(ctx, "swiglu_backward_e4m3");
  check_matrix("swiglu_backward_e4m3", dy);
  check_tensor("swiglu_backward_e4m3: pre", pre, {dy.size(0), 2 * dy.size(1)}, dy.dtype);
  check_cast("swiglu_backward_e4m3: dpre", dpre, dy, 2);
  check_cast("swiglu_backward_e4m3: y", y, dy, 1);
  const auto [gate, up] = halves(pre);
  const auto fused = [&, gate = gate, up = up] { return cuda::swiglu_backward_e4m3(ctx, dpre, y, dy, gate, up); };
  if (runs_fused_cast(ctx, dy, fused)) return;
  for_each_cast(dy.size(0), 3 * dy.size(1) * size_of(dy.dtype), [&, gate = gate, up = up](int64_t begin, int64_t end) {
    Scratch::Scope scope(ctx.scratch);
    const Tensor dpre_values = scope.alloc(dy.dtype, {end - begin, pre.size(1)}, "gradient of the activation"),
                 y_values = scope.alloc(dy.dtype, {end - begin, dy.size(1)}, "activation");
    const auto [dgate, dup] = halves(dpre_values);
    swiglu_backward(ctx, dgate, dup, dy.slice(0, begin, end), gate.slice(0, begin, end), up.slice(0, begin, end),
                    y_values);
    cast_rows_e4m3(ctx, rows_of(dpre, begin, end), dpre_values);
    cast_rows_e4m3(ctx, rows_of(y, begin, end), y_values);
  });
}

}  // namespace triad
