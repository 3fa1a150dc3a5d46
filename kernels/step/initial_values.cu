// Initial values on the GPU. Drawing is bound by arithmetic: some 150 integer and 80 double instructions a number, so
// the stores need no vectors. A thread draws numbers that lie a CTA's width apart, and a warp's stores fill whole
// lines. Its cos and log are engine/normal.h's, so the bits are the CPU's.
#include "engine/rng.h"
#include "kernels/common/launch.cuh"
#include "kernels/step/initial_values.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kNumbersAThread = 8;

template <class T>
__global__ void __launch_bounds__(kThreads)
    draw_normal_kernel(T* __restrict__ out, int64_t n, uint64_t first, uint64_t seed, uint64_t stream, double std) {
  const int64_t begin = int64_t{blockIdx.x} * (kThreads * kNumbersAThread) + threadIdx.x;
#pragma unroll 1
  for (int k = 0; k < kNumbersAThread; ++k) {
    const int64_t i = begin + k * kThreads;
    if (i >= n) return;
    out[i] = from_float<T>(static_cast<float>(std * Philox(seed, stream).normal(first + static_cast<uint64_t>(i))));
  }
}

// 2 u - 1 is exact, so a contraction to a fused multiply-add has the same bits.
template <class T>
__global__ void __launch_bounds__(kThreads)
    draw_uniform_kernel(T* __restrict__ out, int64_t n, uint64_t first, uint64_t seed, uint64_t stream, double bound) {
  const int64_t begin = int64_t{blockIdx.x} * (kThreads * kNumbersAThread) + threadIdx.x;
#pragma unroll 1
  for (int k = 0; k < kNumbersAThread; ++k) {
    const int64_t i = begin + k * kThreads;
    if (i >= n) return;
    const double u = Philox(seed, stream).uniform(first + static_cast<uint64_t>(i));
    out[i] = from_float<T>(static_cast<float>(bound * (2 * u - 1)));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) fill_constant_kernel(T* __restrict__ out, int64_t n, float value) {
  const int64_t begin = int64_t{blockIdx.x} * (kThreads * kNumbersAThread) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kNumbersAThread; ++k)
    if (begin + k * kThreads < n) out[begin + k * kThreads] = from_float<T>(value);
}

dim3 grid_of(int64_t n) { return dim3(static_cast<unsigned>(ceil_div(n, int64_t{kThreads} * kNumbersAThread))); }

}  // namespace

void draw_normal(Context& ctx, Tensor out, int64_t first, const NormalValues& values) {
  const int64_t n = out.numel();
  dispatch_gpu_float(out.dtype, [&]<class T>() {
    launch(ctx, "draw_normal", draw_normal_kernel<T>, grid_of(n), dim3(kThreads), 0, out.ptr<T>(), n,
           static_cast<uint64_t>(first), values.seed, values.stream, values.std);
  });
}

void draw_uniform(Context& ctx, Tensor out, int64_t first, const UniformValues& values) {
  const int64_t n = out.numel();
  dispatch_gpu_float(out.dtype, [&]<class T>() {
    launch(ctx, "draw_uniform", draw_uniform_kernel<T>, grid_of(n), dim3(kThreads), 0, out.ptr<T>(), n,
           static_cast<uint64_t>(first), values.seed, values.stream, values.bound);
  });
}

void fill_constant(Context& ctx, Tensor out, double value) {
  const int64_t n = out.numel();
  dispatch_gpu_float(out.dtype, [&]<class T>() {
    launch(ctx, "fill_constant", fill_constant_kernel<T>, grid_of(n), dim3(kThreads), 0, out.ptr<T>(), n,
           static_cast<float>(value));
  });
}

}  // namespace triad::cuda
