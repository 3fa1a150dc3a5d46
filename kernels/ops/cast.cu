// Conversion between f32 and bf16 on the GPU.
//
// cast is bound by memory: 6 bytes an element. A thread converts four-element vectors, which are 16 bytes on the f32
// side, so that a warp reads and writes whole lines (with 8 elements, each f32 store would write every other 16 bytes).
// It loads four vectors before it stores one. The up to 3 elements after the last whole vector are converted by the
// first threads.
//
// upcast and downcast convert one element per thread. They are not optimised, since only the reference routes use them.
#include "kernels/common/bthd.cuh"
#include "kernels/ops/cast.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kBatch = 4;

// V elements that one instruction loads or stores.
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

// at(i): where a strided tensor has element i, counted as in a contiguous tensor with the same shape.
struct Strided {
  int64_t size1, size2, width, stride0, stride1, stride2;
  __device__ int64_t at(int64_t i) const {
    const int64_t row = i / width, two = row % size2, one = row / size2 % size1, zero = row / size2 / size1;
    return zero * stride0 + one * stride1 + two * stride2 + i % width;
  }
};
Strided strided(const ConstTensor& t) {
  if (t.rank == 2) return {1, t.size(0), t.size(1), 0, 0, t.stride[0]};
  return {t.size(1), t.size(2), t.size(3), t.stride[0], t.stride[1], t.stride[2]};
}

__global__ void __launch_bounds__(kThreads)
    upcast_kernel(float* __restrict__ y, const __nv_bfloat16* __restrict__ x, const Strided from, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) y[i] = to_float(x[from.at(i)]);
}

// Writes x plus the addend, rounded to bf16. y may be the addend itself.
__global__ void __launch_bounds__(kThreads)
    downcast_kernel(__nv_bfloat16* y, const Strided to, const float* __restrict__ x, const __nv_bfloat16* addend,
                    const Strided added, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) y[to.at(i)] = from_float<__nv_bfloat16>(x[i] + (addend == nullptr ? 0.0f : to_float(addend[added.at(i)])));
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

void upcast(Context& ctx, Tensor y, ConstTensor x) {
  launch(ctx, "upcast", upcast_kernel, dim3(ceil_div(x.numel(), kThreads)), dim3(kThreads), 0, y.ptr<float>(),
         x.ptr<__nv_bfloat16>(), strided(x), x.numel());
}

void downcast(Context& ctx, Tensor y, ConstTensor x, ConstTensor addend) {
  const bool adds = !addend.empty();
  launch(ctx, "downcast", downcast_kernel, dim3(ceil_div(y.numel(), kThreads)), dim3(kThreads), 0,
         y.ptr<__nv_bfloat16>(), strided(y), x.ptr<float>(), adds ? addend.ptr<__nv_bfloat16>() : nullptr,
         adds ? strided(addend) : Strided{}, y.numel());
}

}  // namespace triad::cuda
