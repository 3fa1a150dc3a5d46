// Gradient norms per parameter on the GPU, bound by memory: each element is read once. In the first kernel a CTA sums
// one piece; in the second a warp adds one part's pieces. Sums are in double, in an order that depends on the sizes
// alone.
#include "kernels/common/bthd.cuh"
#include "kernels/step/per_param_norms.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Sums one piece. A part may start at any element, so the elements before the first 16-byte vector and
// after the last one are read one by one.
template <class T>
__global__ void __launch_bounds__(kThreads)
    param_norm_pieces_kernel(double* __restrict__ partial, const T* __restrict__ x,
                             const int64_t* __restrict__ pieces) {
  const int64_t begin = pieces[2 * int64_t{blockIdx.x}];
  const int count = static_cast<int>(pieces[2 * int64_t{blockIdx.x} + 1]);
  constexpr int V = kVector<T>;
  const T* const values = x + begin;
  const int head = min(count, static_cast<int>((16 - reinterpret_cast<uintptr_t>(values) % 16) % 16 / sizeof(T)));
  const int vectors = (count - head) / V, tail = head + V * vectors;
  double squares = 0;
  int not_finite = 0;
  const auto add = [&](float v) {
    squares = fma(static_cast<double>(v), static_cast<double>(v), squares);
    not_finite += !isfinite(v);
  };
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    float v[V];
    load_vector<V>(v, values + head + V * i);
#pragma unroll
    for (int j = 0; j < V; ++j) add(v[j]);
  }
  const int loose = static_cast<int>(threadIdx.x);
  if (loose < head) add(to_float(values[loose]));
  if (tail + loose < count) add(to_float(values[tail + loose]));

  __shared__ double warps[kWarps][ParamNorms::count];
  squares = warp_sum_to_lane0(squares);
  const double bad = warp_sum_to_lane0(static_cast<double>(not_finite));
  if (threadIdx.x % 32 == 0) {
    warps[threadIdx.x / 32][ParamNorms::squares] = squares;
    warps[threadIdx.x / 32][ParamNorms::not_finite] = bad;
  }
  __syncthreads();
  if (threadIdx.x >= ParamNorms::count) return;
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += warps[w][threadIdx.x];
  partial[int64_t{blockIdx.x} * ParamNorms::count + threadIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    param_norms_kernel(double* __restrict__ norms, const double* __restrict__ partial,
                       const int64_t* __restrict__ first_piece, int64_t parts) {
  const int64_t part = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (part >= parts) return;
  const int64_t begin = first_piece[part], end = first_piece[part + 1];
  double sum[ParamNorms::count] = {};
  for (int64_t p = begin + threadIdx.x % 32; p < end; p += 32)
#pragma unroll
    for (int f = 0; f < ParamNorms::count; ++f) sum[f] += partial[p * ParamNorms::count + f];
#pragma unroll
  for (int f = 0; f < ParamNorms::count; ++f) {
    sum[f] = warp_sum_to_lane0(sum[f]);
    if (threadIdx.x % 32 == 0) norms[part * ParamNorms::count + f] = sum[f];
  }
}

}  // namespace

void per_param_norms(Context& ctx, Tensor norms, ConstTensor x, ConstTensor pieces, ConstTensor first_piece) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor partial = scope.alloc(DType::f64, {pieces.size(0), ParamNorms::count});
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    launch(ctx, "per_param_norms", param_norm_pieces_kernel<T>, dim3(pieces.size(0)), dim3(kThreads), 0,
           partial.ptr<double>(), x.ptr<T>(), pieces.ptr<int64_t>());
  });
  launch(ctx, "per_param_norms", param_norms_kernel, dim3(ceil_div(norms.size(0), kWarps)), dim3(kThreads), 0,
         norms.ptr<double>(), partial.ptr<double>(), first_piece.ptr<int64_t>(), norms.size(0));
}

}  // namespace triad::cuda
