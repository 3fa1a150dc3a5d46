// Conversion between f32 and bf16 on the GPU: 6 bytes an element, 4 on one side and 2 on the other. A thread converts 2
// x 8 elements, which it loads before it stores; the up to 7 elements after the last whole vector go to the first
// threads.
#include "kernels/bthd.cuh"
#include "kernels/cast.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kBatch = 2;

template <class To, class From, int V>
__global__ void __launch_bounds__(kThreads) cast_kernel(To* __restrict__ to, const From* __restrict__ from, int64_t n) {
  const int64_t vectors = n / V, first = int64_t{blockIdx.x} * kThreads * kBatch + threadIdx.x;
  float x[kBatch][V];
#pragma unroll
  for (int k = 0; k < kBatch; ++k)
    if (first + k * kThreads < vectors) load_vector<V>(x[k], from + (first + k * kThreads) * V);
#pragma unroll
  for (int k = 0; k < kBatch; ++k)
    if (first + k * kThreads < vectors) store_vector<V>(to + (first + k * kThreads) * V, x[k]);
  if (first < n - vectors * V) to[vectors * V + first] = from_float<To>(to_float(from[vectors * V + first]));
}

}  // namespace

void cast(Context& ctx, Tensor dst, ConstTensor src) {
  const int64_t n = src.numel();
  dispatch_gpu_float(dst.dtype, [&]<class To>() {
    using From = std::conditional_t<std::is_same_v<To, float>, __nv_bfloat16, float>;
    const bool aligned = is_aligned(dst) && is_aligned(src);
    dispatch_vector<__nv_bfloat16>(aligned, [&]<int V>() {
      launch(ctx, "cast", cast_kernel<To, From, V>, dim3(ceil_div(n, kThreads * kBatch * V)), dim3(kThreads), 0,
             dst.ptr<To>(), src.ptr<From>(), n);
    });
  });
}

}  // namespace triad::cuda
