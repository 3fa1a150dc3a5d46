// Column sums on the CPU, in two passes with a fixed order: row pieces in parallel, then each column's pieces.
#include "kernels/ops/column_sum.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

template <class T>
void column_sum_cpu(Context& ctx, Tensor y, ConstTensor x) {
  using A = acc_t<T>;
  constexpr int64_t kPiece = 64;
  const int64_t N = x.size(0), C = x.size(1), pieces = ceil_div(N, kPiece);
  Scratch::Scope scope(ctx.scratch);
  const Tensor partials = scope.alloc(y.dtype, {pieces, C});
  parallel_for(ctx, pieces, [&](int64_t piece) {
    A* const partial = partials.ptr<A>() + piece * C;
    std::fill_n(partial, C, A{0});
    for (int64_t n = piece * kPiece; n < std::min((piece + 1) * kPiece, N); ++n)
      axpy(partial, A{1}, x.ptr<T>() + n * x.stride[0], C);
  });
  parallel_for(ctx, C, [&](int64_t c) {
    A sum = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) sum += partials.ptr<A>()[piece * C + c];
    y.ptr<A>()[c] += sum;
  });
}

}  // namespace

void column_sum(Context& ctx, Tensor y, ConstTensor x) {
  const OpScope op_scope(ctx, "column_sum");
  TRIAD_CHECK(x.rank == 2 && is_float(x.dtype), "column_sum: {} is no matrix of floats", x.str());
  check_tensor("column_sum: y", y, {x.size(1)}, acc_dtype(x.dtype));
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::column_sum(ctx, y, x);
  }
  dispatch_float(x.dtype, [&]<class T>() { column_sum_cpu<T>(ctx, y, x); });
}

}  // namespace triad
