// Sums the branches' gradients on the GPU. Bound by memory: 4 tensors with N*W elements. A thread adds 16 bytes from
// each branch, or one element if a row isn't made of whole 16-byte vectors.
#include "kernels/common/bthd.cuh"
#include "kernels/nsa/branch_sum.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    branch_sum_kernel(T* __restrict__ out, const T* __restrict__ parts, int64_t N, int W, int64_t out_stride,
                      int64_t parts_stride) {
  const int vectors = W / V;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x, row = at / vectors;
  if (row >= N) return;
  const int j = static_cast<int>(at % vectors) * V;
  const T* const from = parts + row * parts_stride + j;
  float cmp[V], sel[V], win[V];
  load_vector<V>(cmp, from), load_vector<V>(sel, from + W), load_vector<V>(win, from + 2 * W);
#pragma unroll
  for (int i = 0; i < V; ++i) cmp[i] = (cmp[i] + sel[i]) + win[i];
  store_vector<V>(out + row * out_stride + j, cmp);
}

}  // namespace

void branch_sum(Context& ctx, Tensor out, ConstTensor parts) {
  const int64_t N = out.size(0), W = out.size(1);
  dispatch_gpu_float(out.dtype, [&]<class T>() {
    constexpr int kV = kVector<T>;
    // Each branch's columns have to begin at a whole vector too.
    const bool vectors = W % kV == 0 && has_vectors(ConstTensor(out), kV) && has_vectors(parts, kV);
    dispatch_vector<T>(vectors, [&]<int V>() {
      launch(ctx, "branch_sum", branch_sum_kernel<T, V>, dim3(ceil_div(N * (W / V), kThreads)), dim3(kThreads), 0,
             out.ptr<T>(), parts.ptr<T>(), N, static_cast<int>(W), out.stride[0], parts.stride[0]);
    });
  });
}

}  // namespace triad::cuda
