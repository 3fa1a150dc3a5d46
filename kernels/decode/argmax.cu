// Argmax on the GPU, one CTA per row. A row with 50,257 logits is 100 KB, and each thread has four loads in flight, of
// 16 bytes if rows are aligned.
#include <cub/warp/warp_reduce.cuh>

#include "kernels/common/bthd.cuh"
#include "kernels/common/launch_pdl.cuh"
#include "kernels/decode/argmax.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 1024;

struct Largest {
  float value = -INFINITY;
  int at = 0x7fffffff;
  __device__ void include(float v, int i) {
    if (v > value || (v == value && i < at)) value = v, at = i;
  }
};
// The largest value in a warp's lanes, valid in lane 0. The result does not depend on comparison order.
__device__ Largest largest_of_warp(const Largest& mine) {
  using WarpReduce = cub::WarpReduce<Largest>;
  typename WarpReduce::TempStorage empty;  // a 32-lane reduction uses no shared memory
  return WarpReduce(empty).Reduce(mine, [](Largest a, const Largest& b) {
    a.include(b.value, b.at);
    return a;
  });
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) argmax_kernel(int32_t* token, const T* logits, int64_t stride, int vocab) {
  __shared__ float values[kThreads / 32];
  __shared__ int places[kThreads / 32];
  pdl_trigger();
  pdl_wait();
  const T* const row = logits + blockIdx.x * stride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Largest mine;
  bool finite = true;
  const auto include = [&](float x, int i) {
    finite = finite && isfinite(x);
    mine.include(x, i);
  };
  const int vectors = vocab / V;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    float x[V];
    load_vector<V>(x, row + i * V);
#pragma unroll
    for (int j = 0; j < V; ++j) include(x[j], i * V + j);
  }
  if (const int i = vectors * V + static_cast<int>(threadIdx.x); i < vocab) include(to_float(row[i]), i);
  mine = largest_of_warp(mine);
  if (lane == 0) values[warp] = mine.value, places[warp] = mine.at;
  finite = __syncthreads_and(finite);
  if (warp > 0) return;
  mine = largest_of_warp({values[lane], places[lane]});
  if (lane == 0) token[blockIdx.x] = finite ? mine.at : -1;
}

__global__ void advance_kernel(int32_t* position, int N, int last) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < N) position[i] = min(position[i] + 1, last);
}

}  // namespace

void argmax(Context& ctx, Tensor token, ConstTensor logits, int64_t vocab) {
  dispatch_gpu_float(logits.dtype, [&]<class T>() {
    dispatch_vector<T>(has_vectors(logits, kVector<T>), [&]<int V>() {
      launch_pdl(ctx, "argmax", argmax_kernel<T, V>, dim3(static_cast<unsigned>(logits.size(0))), dim3(kThreads), 0,
                 token.ptr<int32_t>(), logits.ptr<T>(), logits.stride[0], static_cast<int>(vocab));
    });
  });
}

void advance(Context& ctx, Tensor position, int64_t last) {
  constexpr int kAdvanceThreads = 128;
  const int64_t N = position.size(0);
  launch_pdl(ctx, "advance", advance_kernel, dim3(static_cast<unsigned>(ceil_div(N, kAdvanceThreads))),
             dim3(kAdvanceThreads), 0, position.ptr<int32_t>(), static_cast<int>(N), static_cast<int>(last));
}

}  // namespace triad::cuda
