// Column sums on the GPU, bound by reading x once. A lane adds one 16-byte column vector over every 8th row in its
// CTA's piece, a CTA adds its warps in order and writes one slice of partial sums, and partials.cuh adds the slices in
// order. There are about four CTAs per SM, so the slices are few and small compared with x.
#include <algorithm>

#include "kernels/common/bthd.cuh"
#include "kernels/common/partials.cuh"
#include "kernels/ops/column_sum.h"

namespace triad::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int64_t kCtasPerSm = 4;

// blockIdx.x: the piece, rows blockIdx.x * kWarps + warp and every gridDim.x * kWarps-th after it; blockIdx.y: 32 * V
// columns.
template <class T, int V>
__global__ void __launch_bounds__(32 * kWarps)
    column_sum_kernel(float* __restrict__ slices, const T* __restrict__ x, int64_t x_stride, int64_t N, int C) {
  __shared__ float sums[kWarps][32 * V];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = static_cast<int>(blockIdx.y) * 32 * V, column = first + lane * V;
  float sum[V] = {};
  if (column < C) {
#pragma unroll 4
    for (int64_t row = int64_t{blockIdx.x} * kWarps + warp; row < N; row += int64_t{gridDim.x} * kWarps) {
      float v[V];
      load_vector<V>(v, x + row * x_stride + column);
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += v[j];
    }
  }
  pdl_trigger();
#pragma unroll
  for (int j = 0; j < V; ++j) sums[warp][lane * V + j] = sum[j];
  __syncthreads();
  for (int c = threadIdx.x; c < 32 * V && first + c < C; c += 32 * kWarps) {
    float total = sums[0][c];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) total += sums[i][c];
    slices[int64_t{blockIdx.x} * C + first + c] = total;
  }
}

}  // namespace

void column_sum(Context& ctx, Tensor y, ConstTensor x) {
  const int64_t N = x.size(0), C = x.size(1);
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    // The same for any alignment, which a plan does not know.
    const int64_t vectors_across = ceil_div(C, 32 * kVector<T>);
    const int64_t pieces = std::clamp<int64_t>(kCtasPerSm * ctx.num_sms / std::max<int64_t>(vectors_across, 1), 1,
                                               std::max<int64_t>(ceil_div(N, kWarps), 1));
    Scratch::Scope scope(ctx.scratch);
    const Tensor slices = scope.alloc(DType::f32, {pieces, C});
    dispatch_vector<T>(has_vectors(x, kVector<T>), [&]<int V>() {
      launch(ctx, "column_sum", column_sum_kernel<T, V>,
             dim3(static_cast<unsigned>(pieces), static_cast<unsigned>(ceil_div(C, 32 * V))), dim3(32 * kWarps), 0,
             slices.ptr<float>(), x.ptr<T>(), x.stride[0], N, static_cast<int>(C));
    });
    add_partials(ctx, slices, {{.grad = y}});
  });
}

}  // namespace triad::cuda
