// Cross-entropy on the GPU. Bound by memory: in bf16 2 bytes a logit forward and 4 backward; training does both in one
// pass over the logits, 4 bytes instead of 6.
//   forward   One CTA per row, which is read once. Each thread keeps a running maximum and a running sum of exp(x -
//             maximum), rescaled when the maximum grows; threads, then warps are merged in a fixed order. A thread
//             issues the loads for half its part of the row together, so 160 KB per SM are in flight.
//   backward  Reads the row and writes the gradient, in place if dlogits is logits. A thread loads four vectors before
//             it stores them. Rows without a target are only written.
//   resident  Forward and backward in one kernel: a row stays in shared memory between a softmax's two passes. One
//             1,024-thread CTA per SM loops over rows; while it works on a row, the next one loads into a second
//             buffer. A thread reads only what it copied itself, so the sum's barrier is the only one per row. The two
//             exps a logit take about half as long as the row's bytes and overlap with them. Rows that are too long for
//             an SM are held by CTA clusters on Hopper (cross_entropy_sm90.cu). Where that is not possible, and if rows
//             are not aligned, the forward and backward kernels are used instead.
#include <algorithm>

#include "kernels/common/shared_limits.h"
#include "kernels/ops/cross_entropy.cuh"

namespace triad::cuda {
namespace {

constexpr int kForwardThreads = 256, kForwardWarps = kForwardThreads / 32, kForwardBatch = 13, kForwardCtasPerSm = 3;
constexpr int kBackwardThreads = 256, kBatch = 4;

template <class T, int V>
__global__ void __launch_bounds__(kForwardThreads, kForwardCtasPerSm)
    cross_entropy_forward_kernel(float* __restrict__ loss, float* __restrict__ lse, const T* __restrict__ logits,
                                 int64_t stride, const int32_t* __restrict__ targets, int64_t vocab) {
  __shared__ WarpSums<kForwardWarps> warps;
  constexpr int kStep = kForwardThreads * V;
  const int64_t row = blockIdx.x, whole_vectors = vocab / V * V;
  const T* x = logits + row * stride;
  ExpSum part;
  for (int64_t c = int64_t{threadIdx.x} * V; c < whole_vectors; c += kForwardBatch * kStep) {
    LogitVector<T, V> v[kForwardBatch];
#pragma unroll
    for (int k = 0; k < kForwardBatch; ++k) {
      v[k].set_lowest();
      if (c + k * kStep < whole_vectors) v[k].load(x + c + k * kStep);
    }
    float top = part.max;
#pragma unroll
    for (int k = 0; k < kForwardBatch; ++k) top = fmaxf(top, v[k].max());
    part.rescale(top);
#pragma unroll
    for (int k = 0; k < kForwardBatch; ++k) {
      float values[V];
      v[k].unpack(values);
      part.add_below(values);
    }
  }
  if (const int64_t j = whole_vectors + threadIdx.x; j < vocab) part.add(to_float(x[j]));  // the last vocab % V logits
  part.merge_warp();
  warps.put(part);
  __syncthreads();
  const ExpSum whole = warps.merge();
  if (threadIdx.x != 0) return;
  const int32_t target = targets[row];
  lse[row] = whole.max + logf(whole.sum);
  loss[row] = target < 0 ? 0.0f : loss_of(whole, to_float(x[target]));
}

template <class T, int V>
__global__ void __launch_bounds__(kBackwardThreads)
    cross_entropy_backward_kernel(T* dlogits, int64_t dlogits_stride, const T* logits, int64_t logits_stride,
                                  const float* __restrict__ lse, const int32_t* __restrict__ targets, int64_t vocab,
                                  int64_t columns, LossScale loss_scale) {
  const auto scale = static_cast<float>(loss_scale.value());
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

template <class T>
__global__ void __launch_bounds__(kResidentThreads, 1)
    cross_entropy_resident_kernel(float* __restrict__ loss, T* dlogits, const T* logits, LogitsShape shape,
                                  const int32_t* __restrict__ targets, int buffers, LossScale scale) {
  __shared__ WarpSums<kResidentWarps> sums[2];
  process_resident_rows(sums, loss, dlogits, logits, shape, targets, buffers, static_cast<int>(shape.columns), scale);
}

// How many logit rows fit into an SM's shared memory, at most 2; 0 if a row is too long or not aligned.
int resident_rows(const Context& ctx, ConstTensor logits) {
  const int64_t shared_bytes = shared_limits(ctx).cta_bytes - sizeof(WarpSums<kResidentWarps>[2]);
  const int64_t row_bytes = logits.size(1) * size_of(logits.dtype);
  if (!has_vectors(logits, 16 / static_cast<int>(size_of(logits.dtype)))) return 0;
  return static_cast<int>(std::min<int64_t>(2, shared_bytes / row_bytes));
}

}  // namespace

void cross_entropy_forward(Context& ctx, Tensor loss, Tensor lse, ConstTensor logits, ConstTensor targets,
                           int64_t vocab) {
  dispatch_gpu_float(logits.dtype, [&]<class T>() {
    dispatch_vector<T>(has_vectors(logits, kVector<T>), [&]<int V>() {
      launch(ctx, "cross_entropy forward", cross_entropy_forward_kernel<T, V>, dim3(logits.size(0)),
             dim3(kForwardThreads), 0, loss.ptr<float>(), lse.ptr<float>(), logits.ptr<T>(), logits.stride[0],
             targets.ptr<int32_t>(), vocab);
    });
  });
}

void cross_entropy_backward(Context& ctx, Tensor dlogits, ConstTensor logits, ConstTensor lse, ConstTensor targets,
                            int64_t vocab, LossScale scale) {
  dispatch_gpu_float(logits.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, dlogits, logits), [&]<int V>() {
      launch(ctx, "cross_entropy backward", cross_entropy_backward_kernel<T, V>, dim3(logits.size(0)),
             dim3(kBackwardThreads), 0, dlogits.ptr<T>(), dlogits.stride[0], logits.ptr<T>(), logits.stride[0],
             lse.ptr<float>(), targets.ptr<int32_t>(), vocab, logits.size(1), scale);
    });
  });
}

void cross_entropy_forward_backward(Context& ctx, Tensor loss, Tensor dlogits, ConstTensor logits, ConstTensor targets,
                                    int64_t vocab, LossScale scale) {
  const bool aligned = has_vectors(dlogits, 16 / static_cast<int>(size_of(dlogits.dtype)));
  const int buffers = aligned ? resident_rows(ctx, logits) : 0;
  Scratch::Scope scope(ctx.scratch);  // allocated in either case, since a plan does not know the alignment
  const Tensor row_lse = scope.alloc(DType::f32, loss.shape());
  if (buffers == 0) {
    if (cross_entropy_forward_backward_sm90(ctx, loss, dlogits, logits, targets, vocab, scale)) return;
    cuda::cross_entropy_forward(ctx, loss, row_lse, logits, targets, vocab);
    return cuda::cross_entropy_backward(ctx, dlogits, logits, row_lse, targets, vocab, scale);
  }
  dispatch_gpu_float(logits.dtype, [&]<class T>() {
    const LogitsShape shape = {logits.size(0), vocab, logits.size(1), logits.stride[0], dlogits.stride[0]};
    launch(ctx, "cross_entropy", cross_entropy_resident_kernel<T>, dim3(std::min<int64_t>(ctx.num_sms, shape.rows)),
           dim3(kResidentThreads), buffers * shape.columns * sizeof(T), loss.ptr<float>(), dlogits.ptr<T>(),
           logits.ptr<T>(), shape, targets.ptr<int32_t>(), buffers, scale);
  });
}

}  // namespace triad::cuda
