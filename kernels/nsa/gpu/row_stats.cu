// Computes query rows' softmax statistics for the backward kernels (nsa/gpu/row_stats.cuh).
#include "kernels/nsa/gpu/row_stats.cuh"

#include "kernels/nsa/gpu/attend.cuh"

namespace triad::cuda {
namespace {

// One thread computes one row's statistics.
__global__ void __launch_bounds__(256)
    bwd_row_stats_kernel(RowStats* row_stats, const View<const float> lse, const View<const float> delta,
                         const View<const float> gate, Divisor heads, int rows, int groups) {
  const int row = static_cast<int>(blockIdx.x * 256 + threadIdx.x), bg = blockIdx.y;
  if (row >= rows) return;
  const int b = bg / groups, g = bg % groups, t = heads.quotient(row),
            head = g * heads.value() + row - t * heads.value();
  const float x = *lse.at(b, t, head), d = *delta.at(b, t, head), w = gate.data == nullptr ? 1.0f : *gate.at(b, t, g);
  const bool unused = x == -INFINITY || w == 0.0f;  // the row sees no key, or its gate is 0
  row_stats[static_cast<int64_t>(bg) * rows + row] =
      unused ? no_weight() : make_float2(fmaf(x, kLog2e, -log2f(w)), d / w);
}

}  // namespace

Tensor compute_row_stats(Context& ctx, Scratch::Scope& scope, const AttendGradIn& grad, const AttendIn& in) {
  const Tensor row_stats =
      scope.alloc(DType::f32, {in.q.size(0) * in.k.size(2), in.q.size(1) * (in.q.size(2) / in.k.size(2)), 2});
  const int rows = static_cast<int>(row_stats.size(1)), groups = static_cast<int>(in.k.size(2));
  launch(ctx, "row_stats", bwd_row_stats_kernel, dim3(ceil_div(rows, 256), row_stats.size(0)), dim3(256), 0,
         reinterpret_cast<RowStats*>(row_stats.data), make_view<const float>(grad.lse),
         make_view<const float>(grad.delta), make_view<const float>(grad.gate),
         Divisor(static_cast<int>(in.q.size(2) / groups)), rows, groups);
  return row_stats;
}

}  // namespace triad::cuda
