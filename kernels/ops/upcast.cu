// Upcast and downcast on the GPU, one element per thread. Not optimised, since only the reference routes use them.
#include "kernels/common/launch.cuh"
#include "kernels/ops/upcast.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

// at(i): the offset in a strided tensor of element i of the contiguous tensor of the same shape.
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
