// Rank sums on the GPU. A thread adds 16 bytes from each rank, or one element if rows are not whole 16-byte vectors.
#include "kernels/common/bthd.cuh"
#include "kernels/step/rank_sum.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

template <class Out, class T, int V>
__global__ void __launch_bounds__(kThreads)
    rank_sum_kernel(Out* out, const T* own, const T* __restrict__ parts, int64_t n, int world, int rank) {
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * V;
  if (at >= n) return;
  float sum[V], share[V];
  load_vector<V>(sum, rank == 0 ? own + at : parts + at);
  for (int r = 1; r < world; ++r) {
    load_vector<V>(share, r == rank ? own + at : parts + r * n + at);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += share[i];
  }
  store_vector<V>(out + at, sum);
}

}  // namespace

void rank_sum(Context& ctx, Tensor out, ConstTensor own, ConstTensor parts, int64_t rank) {
  const int64_t n = own.numel(), world = parts.size(0);
  dispatch_gpu_float(own.dtype, [&]<class T>() {
    const bool vectors = all_have_vectors(kVector<T>, ConstTensor(out), own, parts);
    const auto add = [&]<class Out, int V>() {
      launch(ctx, "rank_sum", rank_sum_kernel<Out, T, V>, dim3(ceil_div(n, kThreads * V)), dim3(kThreads), 0,
             out.ptr<Out>(), own.ptr<T>(), parts.ptr<T>(), n, static_cast<int>(world), static_cast<int>(rank));
    };
    dispatch_vector<T>(vectors, [&]<int V>() {
      if (out.dtype == own.dtype)
        add.template operator()<T, V>();
      else
        add.template operator()<float, V>();
    });
  });
}

}  // namespace triad::cuda
