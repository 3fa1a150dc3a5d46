// Sums over a whole tensor on the CPU, in parallel over pieces; one thread adds the pieces.
#include "kernels/step/reduce.h"

#include <algorithm>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

template <class T>
void pieces_cpu(Context& ctx, Tensor partials, ConstTensor x_in, bool squares) {
  const int64_t n = x_in.numel();
  parallel_for(ctx, partials.numel(), [&](int64_t piece) {
    const T* x = x_in.ptr<T>() + piece * kSumPiece;
    const int64_t count = std::min(kSumPiece, n - piece * kSumPiece);
    double sum = 0;
    if (squares)
      sum = dot<double>(x, x, count);
    else
      for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(x[i]);
    partials.ptr<double>()[piece] = sum;
  });
}

int64_t count_pieces(const ConstTensor& x) { return ceil_div(x.numel(), kSumPiece); }

void piece_sums(Context& ctx, Tensor partials, ConstTensor x, bool squares) {
  check_tensor("sum: partials", partials, {count_pieces(x)}, DType::f64);
  TRIAD_CHECK(x.contiguous(), "sum: {} is strided", x.str());
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::piece_sums(ctx, partials, x, squares);
  }
  dispatch_float(x.dtype, [&]<class T>() { pieces_cpu<T>(ctx, partials, x, squares); });
}

void finish_sum(Context& ctx, Tensor out, ConstTensor partials, bool add) {
  check_tensor("sum: out", out, {1}, DType::f64);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::finish_sum(ctx, out, partials, add);
  }
  parallel_for(ctx, 1, [&](int64_t) {
    double sum = add ? *out.ptr<double>() : 0.0;
    for (int64_t piece = 0; piece < partials.numel(); ++piece) sum += partials.ptr<double>()[piece];
    *out.ptr<double>() = sum;
  });
}

void sum_any(Context& ctx, Tensor out, ConstTensor x, bool squares, bool add) {
  const OpScope op_scope(ctx, "sum");
  Scratch::Scope scope(ctx.scratch);
  const Tensor partials = scope.alloc(DType::f64, {count_pieces(x)});
  piece_sums(ctx, partials, x, squares);
  finish_sum(ctx, out, partials, add);
}

}  // namespace

void sum(Context& ctx, Tensor out, ConstTensor x, bool add) { sum_any(ctx, out, x, /*squares=*/false, add); }
void sum_of_squares(Context& ctx, Tensor out, ConstTensor x, bool add) { sum_any(ctx, out, x, /*squares=*/true, add); }

void square_pieces(Context& ctx, Tensor partials, ConstTensor x) {
  const OpScope op_scope(ctx, "sum");
  piece_sums(ctx, partials, x, /*squares=*/true);
}
void sum_pieces(Context& ctx, Tensor out, ConstTensor partials, bool add) {
  const OpScope op_scope(ctx, "sum");
  finish_sum(ctx, out, partials, add);
}

}  // namespace triad
