// Conversion between f32 and bf16 on the GPU. Bound by memory: 6 bytes an element. A thread converts vectors of four
// elements, which are 16 bytes on the f32 side, so that a warp reads and writes whole lines (with 8 elements, each of
// the two f32 stores would write every other 16 bytes). It loads four vectors before it stores one. The up to 3
// elements after the last whole vector are converted by the first threads.
#include "kernels/common/bthd.cuh"
#include "kernels/ops/cast.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kBatch = 4;

// V elements of T that one instruction loads or stores.
template <class T, int V>
struct alignas(V * sizeof(T)) Vector {
  T x[V];
};

template <class To, class From, int V>
__global__ void __launch_bounds__(kThreads) cast_kernel(To* __restrict__ to, const From* __restrict__ from, int64_t n) {
  const int64_t vectors = n / V, first = int64_t{blockIdx.x} * kThreads * kBatch + threadIdx.x;
  Vector<From, V> in[kBatch];
#pragma unroll
  for (int k = 0; k < kBatch; ++k)
    if (first + k * kThreads < vectors) in[k] = reinterpret_cast<const Vector<From, V>*>(from)[first + k * kThreads];
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    Vector<To, V> out;
#pragma unroll
    for (int j = 0; j < V; ++j) out.x[j] = from_float<To>(to_float(in[k].x[j]));
    if (first + k * kThreads < vectors) reinterpret_cast<Vector<To, V>*>(to)[first + k * kThreads] = out;
  }
  if (first < n - vectors * V) to[vectors * V + first] = from_float<To>(to_float(from[vectors * V + first]));
}

}  // namespace

void cast(Context& ctx, Tensor dst, ConstTensor src) {
  const int64_t n = src.numel();
  dispatch_gpu_float(dst.dtype, [&]<class To>() {
    using From = std::conditional_t<std::is_same_v<To, float>, __nv_bfloat16, float>;
    const bool aligned = is_aligned(dst) && is_aligned(src);
    dispatch_vector<float>(aligned, [&]<int V>() {
      launch(ctx, "cast", cast_kernel<To, From, V>, dim3(ceil_div(n, kThreads * kBatch * V)), dim3(kThreads), 0,
             dst.ptr<To>(), src.ptr<From>(), n);
    });
  });
}

}  // namespace triad::cuda
