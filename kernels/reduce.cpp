// Sums over a whole tensor on the CPU.
#include "kernels/reduce.h"

#include <algorithm>

#include "engine/op_scope.h"
#include "kernels/parallel.h"

namespace triad {

namespace {

template <class T>
void sum_cpu(Context& ctx, Tensor out, ConstTensor x_in, bool squares, bool add) {
  constexpr int64_t kPiece = 1 << 14;
  const int64_t n = x_in.numel(), pieces = (n + kPiece - 1) / kPiece;
  Scratch::Scope scope(ctx.scratch);
  const Tensor partials = scope.alloc(DType::f64, {pieces});
  parallel_for(ctx, pieces, [&](int64_t piece) {
    const T* x = x_in.ptr<T>() + piece * kPiece;
    const int64_t count = std::min(kPiece, n - piece * kPiece);
    double sum = 0;
    if (squares)
      sum = dot<double>(x, x, count);
    else
      for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(x[i]);
    partials.ptr<double>()[piece] = sum;
  });
  parallel_for(ctx, 1, [&](int64_t) {
    double sum = add ? *out.ptr<double>() : 0.0;
    for (int64_t piece = 0; piece < pieces; ++piece) sum += partials.ptr<double>()[piece];
    *out.ptr<double>() = sum;
  });
}

void sum_any(Context& ctx, Tensor out, ConstTensor x, bool squares, bool add) {
  const OpScope op_scope(ctx, "sum");
  check_tensor("sum: out", out, {1}, DType::f64);
  TRIAD_CHECK(x.contiguous(), "sum: {} is strided", x.str());
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::sum(ctx, out, x, squares, add);
  }
  dispatch_float(x.dtype, [&]<class T>() { sum_cpu<T>(ctx, out, x, squares, add); });
}

}  // namespace

void sum(Context& ctx, Tensor out, ConstTensor x, bool add) { sum_any(ctx, out, x, /*squares=*/false, add); }
void sum_of_squares(Context& ctx, Tensor out, ConstTensor x, bool add) { sum_any(ctx, out, x, /*squares=*/true, add); }

}  // namespace triad
