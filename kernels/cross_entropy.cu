// Cross-entropy on the GPU, a CTA a row (50,304 logits: 100 KB in bf16).
//   forward   reads the row once: each thread keeps a running maximum and the sum of exp(x - maximum), rescaled when
//   the
//             maximum grows; threads, then warps are merged in a fixed order.
//   backward  reads the row and writes the gradient, in place if so asked: a thread loads four vectors before it stores
//             them. Rows without a target are only written.
// Bound by memory: 2 bytes a logit forward, 4 backward (bf16); one exp a logit is half of what the card can do
// meanwhile.
#include <cfloat>

#include "kernels/bthd.cuh"
#include "kernels/cross_entropy.h"

namespace triad::cuda {
namespace {

constexpr int kForwardThreads = 512, kForwardWarps = kForwardThreads / 32, kBackwardThreads = 256, kBatch = 4;

// The sum of exp(x) over some logits as sum * exp(max). Starts at the least float, not at -inf: -inf - -inf is NaN.
struct ExpSum {
  float max = -FLT_MAX, sum = 0;

  template <int V>
  __device__ void add(const float (&x)[V]) {
    float top = x[0];
#pragma unroll
    for (int j = 1; j < V; ++j) top = fmaxf(top, x[j]);
    rescale(fmaxf(max, top));
#pragma unroll
    for (int j = 0; j < V; ++j) sum += __expf(x[j] - max);
  }
  __device__ void rescale(float new_max) {
    if (new_max == max) return;  // nearly always, after the first few
    sum *= __expf(max - new_max);
    max = new_max;
  }
  // Merges the 32 lanes; every lane has the result.
  __device__ void merge_warp() {
    rescale(warp_max(max));
    sum = warp_sum(sum);
  }
};

template <class T, int V>
__global__ void __launch_bounds__(kForwardThreads, 3)
    forward_kernel(float* __restrict__ loss, float* __restrict__ lse, const T* __restrict__ logits, int64_t stride,
                   const int32_t* __restrict__ targets, int64_t vocab) {
  __shared__ float maxima[kForwardWarps], sums[kForwardWarps];
  const int64_t row = blockIdx.x, vectors = vocab / V;
  const T* x = logits + row * stride;
  ExpSum part;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < vectors; i += kForwardThreads) {
    float v[V];
    load_vector<V>(v, x + i * V);
    part.add(v);
  }
  if (const int64_t j = vectors * V + threadIdx.x; j < vocab) {  // fewer than V are left
    const float last[1] = {to_float(x[j])};
    part.add(last);
  }
  part.merge_warp();
  if (threadIdx.x % 32 == 0) {
    maxima[threadIdx.x / 32] = part.max;
    sums[threadIdx.x / 32] = part.sum;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  part = {};
  if (threadIdx.x < kForwardWarps) part = {maxima[threadIdx.x], sums[threadIdx.x]};
  part.merge_warp();
  if (threadIdx.x != 0) return;
  const float log_sum = logf(part.sum);
  const int32_t target = targets[row];
  lse[row] = part.max + log_sum;
  // Not lse - x: of logits near 1e4 the difference has digits that lse has not.
  loss[row] = target < 0 ? 0.0f : (part.max - to_float(x[target])) + log_sum;
}

template <class T, int V>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_kernel(T* dlogits, int64_t dlogits_stride, const T* logits, int64_t logits_stride,
                    const float* __restrict__ lse, const int32_t* __restrict__ targets, int64_t vocab, int64_t columns,
                    float scale) {
  const int64_t row = blockIdx.x;
  const T* x = logits + row * logits_stride;
  T* dx = dlogits + row * dlogits_stride;
  const int64_t target = targets[row];
  const int64_t live = target < 0 ? 0 : vocab;  // columns that have a gradient
  const float row_lse = lse[row];
  for (int64_t first = int64_t{threadIdx.x} * V; first < columns; first += kBatch * kBackwardThreads * V) {
    float v[kBatch][V];
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (const int64_t c = first + k * kBackwardThreads * V; c < live) load_vector<V>(v[k], x + c);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int64_t c = first + k * kBackwardThreads * V;
      if (c >= columns) break;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float p = __expf(v[k][j] - row_lse);
        v[k][j] = c + j < live ? scale * (c + j == target ? p - 1.0f : p) : 0.0f;
      }
      store_vector<V>(dx + c, v[k]);
    }
  }
}

}  // namespace

void cross_entropy_forward(Context& ctx, Tensor loss, Tensor lse, ConstTensor logits, ConstTensor targets,
                           int64_t vocab) {
  dispatch_gpu_float(logits.dtype, [&]<class T>() {
    dispatch_vector<T>(has_vectors(logits, kVector<T>), [&]<int V>() {
      launch(ctx, "cross_entropy forward", forward_kernel<T, V>, dim3(logits.size(0)), dim3(kForwardThreads), 0,
             loss.ptr<float>(), lse.ptr<float>(), logits.ptr<T>(), logits.stride[0], targets.ptr<int32_t>(), vocab);
    });
  });
}

void cross_entropy_backward(Context& ctx, Tensor dlogits, ConstTensor logits, ConstTensor lse, ConstTensor targets,
                            int64_t vocab, double scale) {
  dispatch_gpu_float(logits.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, dlogits, logits), [&]<int V>() {
      launch(ctx, "cross_entropy backward", backward_kernel<T, V>, dim3(logits.size(0)), dim3(kBackwardThreads), 0,
             dlogits.ptr<T>(), dlogits.stride[0], logits.ptr<T>(), logits.stride[0], lse.ptr<float>(),
             targets.ptr<int32_t>(), vocab, logits.size(1), scale);
    });
  });
}

}  // namespace triad::cuda
