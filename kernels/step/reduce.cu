// Sums over a whole tensor on the GPU, bound by memory: each element is read once. A CTA sums a piece (16,384
// elements), then one CTA adds the pieces. Addition order depends on the size alone. All sums are in double: memory is
// slower than the card's fp64 units, squared gradients cannot overflow, and hundreds of millions of terms keep their
// precision.
#include "kernels/common/bthd.cuh"
#include "kernels/step/reduce.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kFinishThreads = 1024;
constexpr int64_t kPiece = kSumPiece;  // 64 KiB of f32: 16 vectors per thread

// The sum of x over the CTA's threads, valid in thread 0. A kernel may call it once.
template <int kCount>
__device__ double block_sum(double x) {
  __shared__ double warps[kCount / 32];
  x = warp_sum_to_lane0(x);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  for (int i = 1; i < kCount / 32; ++i) x += warps[i];
  return x;
}

template <class T, int V, bool kSquares>
__global__ void __launch_bounds__(kThreads)
    sum_pieces_kernel(double* __restrict__ partials, const T* __restrict__ x_in, int64_t n) {
  const T* x = x_in + blockIdx.x * kPiece;
  const int count = static_cast<int>(min(kPiece, n - blockIdx.x * kPiece)), vectors = count / V;
  double sum = 0;
  const auto add = [&](float value) {
    const double v = value;
    sum = kSquares ? fma(v, v, sum) : sum + v;
  };
#pragma unroll 8
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    float values[V];
    load_vector<V>(values, x + i * V);
#pragma unroll
    for (int j = 0; j < V; ++j) add(values[j]);
  }
  if (static_cast<int>(threadIdx.x) < count - vectors * V) add(to_float(x[vectors * V + threadIdx.x]));
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kFinishThreads)
    sum_finish_kernel(double* out, const double* __restrict__ partials, int64_t pieces, bool add) {
  double sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < pieces; i += kFinishThreads) sum += partials[i];
  sum = block_sum<kFinishThreads>(sum);
  if (threadIdx.x == 0) *out = (add ? *out : 0.0) + sum;
}

}  // namespace

void piece_sums(Context& ctx, Tensor partials, ConstTensor x, bool squares) {
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    dispatch_vector<T>(is_aligned(x), [&]<int V>() {
      const auto kernel = squares ? sum_pieces_kernel<T, V, true> : sum_pieces_kernel<T, V, false>;
      launch(ctx, "sum pieces", kernel, dim3(partials.numel()), dim3(kThreads), 0, partials.ptr<double>(), x.ptr<T>(),
             x.numel());
    });
  });
}

void finish_sum(Context& ctx, Tensor out, ConstTensor partials, bool add) {
  launch(ctx, "sum finish", sum_finish_kernel, dim3(1), dim3(kFinishThreads), 0, out.ptr<double>(),
         partials.ptr<double>(), partials.numel(), add);
}

}  // namespace triad::cuda
