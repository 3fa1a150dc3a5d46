// Rank sums on the CPU, in parallel over pieces of the tensor; each element is summed in rank order.
#include "kernels/step/rank_sum.h"

#include <algorithm>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

void rank_sum(Context& ctx, Tensor out, ConstTensor own, ConstTensor parts, int64_t rank) {
  const OpScope op_scope(ctx, "rank_sum");
  TRIAD_CHECK(parts.shape().rank == 2 && parts.dtype == own.dtype && parts.size(1) == own.numel() &&
                  (out.dtype == own.dtype || out.dtype == acc_dtype(own.dtype)) && out.numel() == own.numel() &&
                  out.contiguous() && own.contiguous() && parts.contiguous() && rank >= 0 && rank < parts.size(0),
              "sum over ranks of {} and, but for row {}, {} in {}", own.str(), rank, parts.str(), out.str());
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::rank_sum(ctx, out, own, parts, rank);
  }
  constexpr int64_t kPiece = 1 << 14;
  const int64_t n = own.numel(), world = parts.size(0);
  dispatch_float(own.dtype, [&]<class T>() {
    parallel_for(ctx, ceil_div(n, kPiece), [&](int64_t piece) {
      const auto put = [&](int64_t i, acc_t<T> sum) {
        if (out.dtype == own.dtype)
          out.ptr<T>()[i] = T(sum);
        else
          out.ptr<acc_t<T>>()[i] = sum;
      };
      const T *const mine = own.ptr<T>(), *const from = parts.ptr<T>();
      for (int64_t i = piece * kPiece; i < std::min((piece + 1) * kPiece, n); ++i) {
        const auto share = [&](int64_t r) { return static_cast<acc_t<T>>(r == rank ? mine[i] : from[r * n + i]); };
        acc_t<T> sum = share(0);
        for (int64_t r = 1; r < world; ++r) sum += share(r);
        put(i, sum);
      }
    });
  });
}

}  // namespace triad
