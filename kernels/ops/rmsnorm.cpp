// RMSNorm on the CPU, in parallel over rows.
#include "kernels/ops/rmsnorm.h"

#include <algorithm>
#include <cmath>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

void check_rmsnorm(const char* op, const ConstTensor& x, const ConstTensor& w, const ConstTensor& rrms) {
  TRIAD_CHECK(x.rank == 2 && x.size(1) > 0, "{}: x is {}, not a matrix with columns", op, x.str());
  check_tensor("rmsnorm: w", w, {x.size(1)}, x.dtype);
  check_tensor("rmsnorm: rrms", rrms, {x.size(0)}, acc_dtype(x.dtype));
}

template <class T>
void forward_cpu(Context& ctx, Tensor y_out, Tensor rrms, ConstTensor x_in, ConstTensor w_in, double eps) {
  using A = acc_t<T>;
  const int64_t C = x_in.size(1);
  parallel_for(ctx, x_in.size(0), [&](int64_t i) {
    const T *x = x_in.ptr<T>() + i * x_in.stride[0], *w = w_in.ptr<T>();
    T* y = y_out.ptr<T>() + i * y_out.stride[0];
    const A r = A{1} / std::sqrt(dot<A>(x, x, C) / static_cast<A>(C) + static_cast<A>(eps));
    for (int64_t j = 0; j < C; ++j) y[j] = static_cast<T>(static_cast<A>(x[j]) * r * static_cast<A>(w[j]));
    rrms.ptr<A>()[i] = r;
  });
}

// With g = dy * w:  dx = rrms (g - x rrms^2 mean(g x)),  dw = sum over rows of dy x rrms.
// dw is summed in two passes with a fixed order: 64-row pieces in parallel, then each column's pieces in order.
template <class T>
void backward_cpu(Context& ctx, Tensor dx_out, Tensor dw, ConstTensor dy_in, ConstTensor x_in, ConstTensor w_in,
                  ConstTensor rrms, ConstTensor dresidual, Tensor y_out) {
  using A = acc_t<T>;
  constexpr int64_t kPiece = 64;
  const int64_t N = x_in.size(0), C = x_in.size(1), pieces = ceil_div(N, kPiece);
  Scratch::Scope scope(ctx.scratch);
  const Tensor partials = scope.alloc(acc_dtype(x_in.dtype), {pieces, C});
  parallel_for(ctx, pieces, [&](int64_t piece) {
    A* partial = partials.ptr<A>() + piece * C;
    std::fill_n(partial, C, A{0});
    for (int64_t i = piece * kPiece; i < std::min((piece + 1) * kPiece, N); ++i) {
      const T *x = x_in.ptr<T>() + i * x_in.stride[0], *w = w_in.ptr<T>(), *dy = dy_in.ptr<T>() + i * dy_in.stride[0];
      const T* around = dresidual.empty() ? nullptr : dresidual.ptr<T>() + i * dresidual.stride[0];
      T* dx = dx_out.ptr<T>() + i * dx_out.stride[0];
      T* y = y_out.empty() ? nullptr : y_out.ptr<T>() + i * y_out.stride[0];
      const A r = rrms.ptr<A>()[i];
      A sum = 0;
      for (int64_t j = 0; j < C; ++j) {
        const A x_dy = static_cast<A>(x[j]) * static_cast<A>(dy[j]);
        partial[j] += x_dy * r;
        sum += x_dy * static_cast<A>(w[j]);
      }
      const A slope = r * r * sum / static_cast<A>(C);
      for (int64_t j = 0; j < C; ++j) {
        const A g = static_cast<A>(dy[j]) * static_cast<A>(w[j]);
        const A value = r * (g - static_cast<A>(x[j]) * slope);
        if (y != nullptr) y[j] = static_cast<T>(static_cast<A>(x[j]) * r * static_cast<A>(w[j]));
        dx[j] = static_cast<T>(around == nullptr ? value : value + static_cast<A>(around[j]));
      }
    }
  });
  parallel_for(ctx, C, [&](int64_t j) {
    A sum = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) sum += partials.ptr<A>()[piece * C + j];
    dw.ptr<A>()[j] += sum;
  });
}

}  // namespace

void rmsnorm_forward(Context& ctx, Tensor y, Tensor rrms, ConstTensor x, ConstTensor w, double eps) {
  const OpScope op_scope(ctx, "rmsnorm_forward");
  check_rmsnorm("rmsnorm", x, w, rrms);
  check_tensor("rmsnorm: y", y, x.shape(), x.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::rmsnorm_forward(ctx, y, rrms, x, w, eps);
  }
  dispatch_float(x.dtype, [&]<class T>() { forward_cpu<T>(ctx, y, rrms, x, w, eps); });
}

void rmsnorm_forward_e4m3(Context& ctx, const E4m3Rows& y, Tensor rrms, ConstTensor x, ConstTensor w, double eps) {
  const OpScope op_scope(ctx, "rmsnorm_forward_e4m3");
  check_rmsnorm("rmsnorm_forward_e4m3", x, w, rrms);
  check_tensor("rmsnorm_forward_e4m3: y", y.q, x.shape(), DType::u8);
  check_tensor("rmsnorm_forward_e4m3: y's scales", y.scale, {x.size(0)}, DType::f32);
  if (ctx.device.is_cuda() && x.dtype == DType::bf16) {
    if constexpr (kBuiltWithCuda) {
      if (cuda::rmsnorm_forward_e4m3(ctx, y, rrms, x, w, eps)) return;
    } else {
      return;  // a plan without the kernels takes it that they support the call
    }
  }
  Scratch::Scope scope(ctx.scratch);
  const Tensor whole = scope.alloc(x.dtype, x.shape(), "normed rows");
  rmsnorm_forward(ctx, whole, rrms, x, w, eps);
  cast_rows_e4m3(ctx, y, whole);
}

void rmsnorm_backward(Context& ctx, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor w,
                      ConstTensor rrms, ConstTensor dresidual, Tensor y) {
  const OpScope op_scope(ctx, "rmsnorm_backward");
  check_rmsnorm("rmsnorm backward", x, w, rrms);
  check_tensor("rmsnorm backward: dx", dx, x.shape(), x.dtype);
  check_tensor("rmsnorm backward: dw", dw, w.shape(), acc_dtype(x.dtype));
  check_tensor("rmsnorm backward: dy", dy, x.shape(), x.dtype);
  if (!dresidual.empty()) check_tensor("rmsnorm backward: dresidual", dresidual, x.shape(), x.dtype);
  if (!y.empty()) check_tensor("rmsnorm backward: y", y, x.shape(), x.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::rmsnorm_backward(ctx, dx, dw, dy, x, w, rrms, dresidual, y);
  }
  dispatch_float(x.dtype, [&]<class T>() { backward_cpu<T>(ctx, dx, dw, dy, x, w, rrms, dresidual, y); });
}

}  // namespace triad
