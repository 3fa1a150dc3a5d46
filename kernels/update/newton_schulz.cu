// Normalizes matrices on the GPU, bound by memory. In the first kernel a CTA sums a matrix piece's squares, in double;
// in the second a CTA adds its matrix's pieces in order and scales its own piece.
#include "kernels/common/bthd.cuh"
#include "kernels/update/newton_schulz.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int64_t kPiece = 1 << 14;

// The sum of x over the CTA's threads, in every thread.
__device__ double sum_of_block(double x) {
  __shared__ double warps[kWarps];
  x = warp_sum_to_lane0(x);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += warps[w];
  return sum;
}

// Calls f.operator()<V>(i) for this CTA's piece in vectors, as far as they go, and f.operator()<1>(i) for the rest. i:
// an index in all matrices. grid.x: matrices * pieces.
template <int V, class F>
__device__ __forceinline__ void for_each_of_piece(int64_t size, int64_t pieces, F&& f) {
  const int64_t matrix = blockIdx.x / pieces, begin = blockIdx.x % pieces * kPiece;
  const int count = static_cast<int>(min(kPiece, size - begin)), vectors = count / V;
  const int64_t at = matrix * size + begin;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += kThreads) f.template operator()<V>(at + int64_t{i} * V);
  if (static_cast<int>(threadIdx.x) < count - vectors * V) f.template operator()<1>(at + vectors * V + threadIdx.x);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    matrix_squares_kernel(double* __restrict__ partials, const T* __restrict__ x, int64_t size, int64_t pieces) {
  double sum = 0;
  for_each_of_piece<V>(size, pieces, [&]<int N>(int64_t i) {
    float v[N];
    load_vector<N>(v, x + i);
#pragma unroll
    for (int j = 0; j < N; ++j) sum = fma(static_cast<double>(v[j]), static_cast<double>(v[j]), sum);
  });
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    normalize_matrix_kernel(T* __restrict__ y, const T* __restrict__ x, const double* __restrict__ partials,
                            int64_t size, int64_t pieces, double factor) {
  const int64_t first = blockIdx.x / pieces * pieces;
  double sum = 0;
  for (int64_t p = threadIdx.x; p < pieces; p += kThreads) sum += partials[first + p];
  const float scale = static_cast<float>(factor / (sqrt(sum_of_block(sum)) + NewtonSchulz::kEps));
  for_each_of_piece<V>(size, pieces, [&]<int N>(int64_t i) {
    float v[N];
    load_vector<N>(v, x + i);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] *= scale;
    store_vector<N>(y + i, v);
  });
}

}  // namespace

void normalize_matrices(Context& ctx, Tensor y, ConstTensor x, double factor) {
  const int64_t n = x.size(0), size = x.size(1) * x.size(2), pieces = ceil_div(size, kPiece);
  Scratch::Scope scope(ctx.scratch);
  const Tensor partials = scope.alloc(DType::f64, {n, pieces});
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    const bool vectors = is_aligned(x) && is_aligned(y) && size % kVector<T> == 0;
    dispatch_vector<T>(vectors, [&]<int V>() {
      launch(ctx, "matrix squares", matrix_squares_kernel<T, V>, dim3(n * pieces), dim3(kThreads), 0,
             partials.ptr<double>(), x.ptr<T>(), size, pieces);
      launch(ctx, "normalize matrix", normalize_matrix_kernel<T, V>, dim3(n * pieces), dim3(kThreads), 0, y.ptr<T>(),
             x.ptr<T>(), partials.ptr<double>(), size, pieces, factor);
    });
  });
}

}  // namespace triad::cuda
