// The facts of each part on the GPU: a CTA takes a piece, then a warp a part. Each element is read once (4 bytes; 620
// MB of M7C's gradients in some 150 us); sums are double and in an order that the sizes alone decide.
#include "kernels/common/bthd.cuh"
#include "kernels/step/per_param_norms.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ double warp_total(double x) {
  for (int o = 16; o > 0; o >>= 1) x += __shfl_down_sync(0xffffffffu, x, o);
  return x;
}

// Parts begin where they may: up to 3 elements before the first aligned vector, and after the last, go one by one.
__global__ void __launch_bounds__(kThreads)
    pieces_kernel(double* __restrict__ partial, const float* __restrict__ x, const int64_t* __restrict__ pieces) {
  const int64_t begin = pieces[2 * int64_t{blockIdx.x}];
  const int count = static_cast<int>(pieces[2 * int64_t{blockIdx.x} + 1]);
  const float* const values = x + begin;
  const int head = min(count, static_cast<int>((16 - reinterpret_cast<uintptr_t>(values) % 16) % 16 / sizeof(float)));
  const int vectors = (count - head) / 4, tail = head + 4 * vectors;
  double squares = 0;
  int not_finite = 0;
  const auto add = [&](float v) {
    squares = fma(static_cast<double>(v), static_cast<double>(v), squares);
    not_finite += !isfinite(v);
  };
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    const float4 v = *reinterpret_cast<const float4*>(values + head + 4 * i);
    add(v.x), add(v.y), add(v.z), add(v.w);
  }
  const int loose = static_cast<int>(threadIdx.x);
  if (loose < head) add(values[loose]);
  if (tail + loose < count) add(values[tail + loose]);

  __shared__ double warps[kWarps][ParamNorms::count];
  squares = warp_total(squares);
  const double bad = warp_total(not_finite);
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

__global__ void __launch_bounds__(kThreads) parts_kernel(double* __restrict__ facts, const double* __restrict__ partial,
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
    sum[f] = warp_total(sum[f]);
    if (threadIdx.x % 32 == 0) facts[part * ParamNorms::count + f] = sum[f];
  }
}

}  // namespace

void per_param_norms(Context& ctx, Tensor facts, ConstTensor x, ConstTensor pieces, ConstTensor first_piece) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor partial = scope.alloc(DType::f64, {pieces.size(0), ParamNorms::count});
  launch(ctx, "part norms", pieces_kernel, dim3(pieces.size(0)), dim3(kThreads), 0, partial.ptr<double>(),
         x.ptr<float>(), pieces.ptr<int64_t>());
  launch(ctx, "part norms", parts_kernel, dim3(ceil_div(facts.size(0), kWarps)), dim3(kThreads), 0, facts.ptr<double>(),
         partial.ptr<double>(), first_piece.ptr<int64_t>(), facts.size(0));
}

}  // namespace triad::cuda
