// Sums the branches' gradients on the CPU, in parallel over rows.
#include "kernels/nsa/branch_sum.h"

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

void branch_sum(Context& ctx, Tensor out, ConstTensor parts) {
  const OpScope op_scope(ctx, "branch_sum");
  TRIAD_CHECK(out.rank == 2 && is_float(out.dtype), "branch_sum: {} is not [N,W]", out.str());
  check_tensor("branch_sum: parts", parts, {out.size(0), 3 * out.size(1)}, out.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::branch_sum(ctx, out, parts);
  }
  const int64_t W = out.size(1);
  dispatch_float(out.dtype, [&]<class T>() {
    using A = acc_t<T>;
    parallel_for(ctx, out.size(0), [&](int64_t row) {
      T* const to = out.ptr<T>() + row * out.stride[0];
      const T* const from = parts.ptr<T>() + row * parts.stride[0];
#pragma omp simd
      for (int64_t j = 0; j < W; ++j)
        to[j] =
            static_cast<T>((static_cast<A>(from[j]) + static_cast<A>(from[j + W])) + static_cast<A>(from[j + 2 * W]));
    });
  });
}

}  // namespace triad
