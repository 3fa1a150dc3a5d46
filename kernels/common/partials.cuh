// How a parameter gradient is finished. A first kernel writes partial sums to scratch, one slice per CTA;
// add_partials() adds the slices in a fixed order. So no float is added atomically, and every run gives the same bits.
//
// The kernel is short and bound by its launch latency, so it uses programmatic dependent launch
// (common/launch_pdl.cuh): the first kernel should call pdl_trigger() after its last tile.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <limits>

#include "kernels/common/launch_pdl.cuh"
#include "kernels/common/ptx.cuh"

namespace triad::cuda {

// A gradient, and where each slice holds its partial sums:
//   grad[r][c] += sum over slices of slice[offset + r * row_stride + c]
struct PartialGrad {
  Tensor grad;  // [R,C] or [C] f32
  int64_t offset = 0, row_stride = 0;
};

namespace partials_detail {
// Each CTA adds 8 columns: 32 bytes, one memory sector. 64 threads per column keep enough loads in flight.
constexpr int kMaxGrads = 4, kColumns = 8, kLanes = 64, kWarps = kColumns * kLanes / 32;

struct Target {
  float* grad;
  int elements, columns, first_cta;
  int64_t grad_stride, offset, row_stride;
};
struct Targets {
  Target target[kMaxGrads];
  int count;
};

// A CTA sums 8 elements from one gradient over all slices. Lane s adds the slices s, s + 64, ... in order; then each
// warp's lanes are added, then the warps.
static __global__ void __launch_bounds__(kColumns* kLanes)
    add_partials_kernel(Targets targets, const float* slices, int slice_count, int64_t slice_size) {
  __shared__ float warps[kWarps][kColumns];
  int which = 0;
  while (which + 1 < targets.count && static_cast<int>(blockIdx.x) >= targets.target[which + 1].first_cta) ++which;
  const Target t = targets.target[which];
  const int element = (static_cast<int>(blockIdx.x) - t.first_cta) * kColumns + threadIdx.x;
  const bool inside = element < t.elements;
  const int64_t row = inside ? element / t.columns : 0, column = inside ? element % t.columns : 0;
  const float* const from = slices + t.offset + row * t.row_stride + column;
  if (threadIdx.y == 0 && inside)  // grad is needed last; this loads it into L2 during pdl_wait()
    prefetch_l2(t.grad + row * t.grad_stride + column);
  pdl_wait();
  float sum = 0;
  if (inside) {
#pragma unroll 8
    for (int s = threadIdx.y; s < slice_count; s += kLanes) sum += from[s * slice_size];
  }
#pragma unroll
  for (int offset = kColumns; offset < 32; offset *= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
  const int thread = threadIdx.y * kColumns + threadIdx.x;
  if (thread % 32 < kColumns) warps[thread / 32][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || !inside) return;
  float total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += warps[i][threadIdx.x];
  t.grad[row * t.grad_stride + column] += total;
}
}  // namespace partials_detail

// Adds the slices [count, slice size] f32, contiguous, to at most 4 gradients.
inline void add_partials(Context& ctx, const ConstTensor& slices, std::initializer_list<PartialGrad> grads) {
  using namespace partials_detail;
  TRIAD_CHECK(grads.size() <= kMaxGrads, "{} gradients in one call, at most {}", grads.size(), kMaxGrads);
  Targets targets{};
  int64_t ctas = 0;
  for (const PartialGrad& g : grads) {
    const bool matrix = g.grad.rank == 2;
    TRIAD_CHECK(g.grad.numel() <= std::numeric_limits<int32_t>::max(), "a gradient of {} elements in partial sums",
                g.grad.numel());
    targets.target[targets.count++] = {g.grad.ptr<float>(),
                                       static_cast<int>(g.grad.numel()),
                                       static_cast<int>(g.grad.size(-1)),
                                       static_cast<int>(ctas),
                                       matrix ? g.grad.stride[0] : 0,
                                       g.offset,
                                       g.row_stride};
    ctas += ceil_div(g.grad.numel(), kColumns);
  }
  launch_pdl(ctx, "add_partials", add_partials_kernel, dim3(ctas), dim3(kColumns, kLanes), 0, targets,
             slices.ptr<float>(), slices.size(0), slices.size(1));
}

}  // namespace triad::cuda
