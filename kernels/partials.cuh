// The second stage of a parameter gradient: partial sums that a kernel left in scratch, one slice a CTA, are added up
// in a fixed order. So gradients need no atomics and come out with the same bits each time.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "kernels/launch.cuh"

namespace triad::cuda {

// Where in each slice the partial sums of one gradient lie: grad[r][c] += sum over slices of
// slice[offset + r * row_stride + c].
struct PartialGrad {
  Tensor grad;  // [R,C] or [C] f32
  int64_t offset = 0, row_stride = 0;
};

namespace partials_detail {
constexpr int kMaxGrads = 4, kColumns = 32, kLanes = 32;

struct Target {
  float* grad;
  int64_t rows, columns, grad_stride, offset, row_stride;
};
struct Targets {
  Target target[kMaxGrads];
};

// CTA: 32 elements of one gradient x 32 lanes over the slices, so that a lane's loads (8 of 264 slices) are in flight
// together; lanes are added in order.
static __global__ void __launch_bounds__(kColumns* kLanes)
    add_partials_kernel(Targets targets, const float* __restrict__ slices, int64_t slice_count, int64_t slice_size) {
  __shared__ float lanes[kLanes][kColumns];
  const Target t = targets.target[blockIdx.y];
  const int64_t element = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  const bool inside = element < t.rows * t.columns;
  const int64_t row = inside ? element / t.columns : 0, column = inside ? element % t.columns : 0;
  float sum = 0;
  if (inside) {
    const float* p = slices + t.offset + row * t.row_stride + column;
#pragma unroll 8
    for (int64_t s = threadIdx.y; s < slice_count; s += kLanes) sum += p[s * slice_size];
  }
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || !inside) return;
  for (int i = 1; i < kLanes; ++i) sum += lanes[i][threadIdx.x];
  t.grad[row * t.grad_stride + column] += sum;
}
}  // namespace partials_detail

// slices [count, slice size] f32, contiguous.
inline void add_partials(Context& ctx, const ConstTensor& slices, std::initializer_list<PartialGrad> grads) {
  using namespace partials_detail;
  TRIAD_CHECK(grads.size() <= kMaxGrads, "{} gradients in one call, at most {}", grads.size(), kMaxGrads);
  Targets targets{};
  int64_t largest = 0;
  int i = 0;
  for (const PartialGrad& g : grads) {
    const bool matrix = g.grad.rank == 2;
    targets.target[i++] = {
        g.grad.ptr<float>(), matrix ? g.grad.size(0) : 1, g.grad.size(-1), matrix ? g.grad.stride[0] : 0, g.offset,
        g.row_stride};
    largest = std::max(largest, g.grad.numel());
  }
  launch(ctx, "add_partials", add_partials_kernel, dim3(ceil_div(largest, kColumns), grads.size()),
         dim3(kColumns, kLanes), 0, targets, slices.ptr<float>(), slices.size(0), slices.size(1));
}

}  // namespace triad::cuda
