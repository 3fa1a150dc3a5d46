// Cross-entropy on the GPU. Bound by memory: in bf16 2 bytes a logit forward and 4 backward; training does both in one
// pass over the logits, 4 bytes instead of 6.
//   forward   One CTA per row, which is read once. Each thread keeps a running maximum and the sum of exp(x - maximum),
//             rescaled when the maximum grows; threads, then warps are merged in a fixed order. A thread issues the
//             loads of half its part of the row together, so 160 KB per SM are in flight.
//   backward  Reads the row and writes the gradient, in place if dlogits is logits. A thread loads four vectors before
//             it stores them. Rows without a target are only written.
//   resident  Forward and backward in one kernel: a row stays in shared memory between the two passes of a softmax. One
//             CTA of 1,024 threads per SM loops over rows; while it works on a row, the next one loads into a second
//             buffer. A thread reads only what it copied itself, so the sum's barrier is the only one per row. The two
//             exps a logit take about half as long as the row's bytes and overlap with them. Rows that are too long or
//             not aligned use the forward and backward kernels instead.
#include <algorithm>
#include <cfloat>

#include "kernels/common/bthd.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/ops/cross_entropy.h"

namespace triad::cuda {
namespace {

constexpr int kForwardThreads = 256, kForwardWarps = kForwardThreads / 32, kForwardBatch = 13, kForwardCtasPerSm = 3;
constexpr int kBackwardThreads = 256, kBatch = 4;
constexpr int kResidentThreads = 1024, kResidentWarps = kResidentThreads / 32;

// A partial sum of exp(x) over logits, held as sum * exp(max). max starts at the lowest float instead of -inf, since
// -inf - -inf is NaN.
struct ExpSum {
  float max = -FLT_MAX, sum = 0;

  // Adds exp(x) for values x that do not exceed max. x - max is exact for bf16 logits.
  template <int V>
  __device__ void add_below(const float (&x)[V]) {
    float e[V];
#pragma unroll
    for (int j = 0; j < V; ++j) e[j] = exp2_approx((x[j] - max) * kLog2e);
#pragma unroll
    for (int step = 1; step < V; step *= 2)
#pragma unroll
      for (int j = 0; j < V; j += 2 * step) e[j] += e[j + step];
    sum += e[0];
  }
  __device__ void add(float x) {
    rescale(fmaxf(max, x));
    const float one[1] = {x};
    add_below(one);
  }
  __device__ void rescale(float new_max) {
    if (new_max == max) return;
    sum *= exp2_approx((max - new_max) * kLog2e);
    max = new_max;
  }
  // Merges the sums of the warp's 32 lanes; every lane gets the result.
  __device__ void merge_warp() {
    rescale(warp_max(max));
    sum = warp_sum(sum);
  }
};

// V adjacent logits in registers, as loaded; V is 1 or fills 16 bytes.
template <class T, int V>
struct Vector {
  using Raw = std::conditional_t<V == 1, T, uint4>;
  Raw raw;

  __device__ void load(const T* p) { raw = *reinterpret_cast<const Raw*>(p); }
  // Sets all elements to -inf, which changes neither a maximum nor a sum of exponentials.
  __device__ void set_lowest() {
    const uint32_t word = std::is_same_v<T, float> ? 0xff800000u : 0xff80ff80u;
    if constexpr (V > 1)
      raw = make_uint4(word, word, word, word);
    else if constexpr (std::is_same_v<T, float>)
      raw = __uint_as_float(word);
    else
      raw = __ushort_as_bfloat16(word & 0xffff);
  }
  __device__ void unpack(float (&x)[V]) const { load_vector<V>(x, reinterpret_cast<const T*>(&raw)); }
  __device__ float max() const {
    if constexpr (V > 1 && std::is_same_v<T, __nv_bfloat16>) {  // one instruction computes two maxima
      const auto pair = [](uint32_t word) { return reinterpret_cast<const __nv_bfloat162&>(word); };
      const __nv_bfloat162 top = __hmax2(__hmax2(pair(raw.x), pair(raw.y)), __hmax2(pair(raw.z), pair(raw.w)));
      return fmaxf(__low2float(top), __high2float(top));
    } else {
      float x[V];
      unpack(x);
      float top = x[0];
#pragma unroll
      for (int j = 1; j < V; ++j) top = fmaxf(top, x[j]);
      return top;
    }
  }
};

// The partial sums of a CTA's warps in shared memory. Every thread of the CTA computes their merged sum.
template <int kWarps>
struct WarpSums {
  float max[kWarps], sum[kWarps];

  __device__ void put(const ExpSum& merged) {
    if (threadIdx.x % 32 == 0) max[threadIdx.x / 32] = merged.max, sum[threadIdx.x / 32] = merged.sum;
  }
  __device__ ExpSum merge() const {  // needs a barrier after put()
    ExpSum part;
    const int lane = threadIdx.x % 32;
    if (lane < kWarps) part = {max[lane], sum[lane]};
    part.merge_warp();
    return part;
  }
};

// The loss of a row. Computes max - x + log(sum) instead of lse - x: for logits near 1e4, lse has lost the digits that
// the difference keeps.
__device__ __forceinline__ float loss_of(const ExpSum& row, float target_logit) {
  return (row.max - target_logit) + logf(row.sum);
}

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
    Vector<T, V> v[kForwardBatch];
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
  const int64_t live = target < 0 ? 0 : vocab;  // number of columns that have a gradient
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

struct Logits {
  int64_t rows, vocab, columns, stride, dlogits_stride;
};

template <class T>
__global__ void __launch_bounds__(kResidentThreads, 1)
    cross_entropy_resident_kernel(float* __restrict__ loss, T* dlogits, const T* logits, Logits shape,
                                  const int32_t* __restrict__ targets, int buffers, LossScale loss_scale) {
  const auto scale = static_cast<float>(loss_scale.value());
  constexpr int V = kVector<T>;
  __shared__ WarpSums<kResidentWarps> warps[2];
  T* const buffer = reinterpret_cast<T*>(dynamic_shared());
  const int vocab = static_cast<int>(shape.vocab), columns = static_cast<int>(shape.columns);
  const int mine = threadIdx.x * V;
  constexpr int kStep = kResidentThreads * V;
  const auto target_of = [&](int64_t row) { return row < shape.rows ? targets[row] : -1; };
  const auto load = [&](T* to, int64_t row, int target) {
    const T* const x = logits + row * shape.stride;
    if (target >= 0)
      for (int c = mine; c < vocab; c += kStep) copy_async_16(to + c, x + c, 16);
    copy_async_commit();
  };

  int parity = 0, target = target_of(blockIdx.x), next_target = target_of(int64_t{blockIdx.x} + gridDim.x);
  load(buffer, blockIdx.x, target);
  for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x, parity ^= 1) {
    const T* const x = buffer + parity * (buffers - 1) * columns;
    if (buffers == 2) {
      load(buffer + (parity ^ 1) * columns, row + gridDim.x, next_target);
      copy_async_wait_group<1>();
    } else {
      copy_async_wait_group<0>();
    }
    const int far_target = target_of(row + 2 * int64_t{gridDim.x});
    ExpSum part;
    if (target >= 0) {
      // The thread's maximum is found first: with so few vectors, rescaling a running sum would cost as much as the
      // sum.
      const int whole_vectors = vocab / V * V;
#pragma unroll 4
      for (int c = mine; c < whole_vectors; c += kStep) {
        Vector<T, V> v;
        v.load(x + c);
        part.max = fmaxf(part.max, v.max());
      }
#pragma unroll 2
      for (int c = mine; c < whole_vectors; c += kStep) {
        float v[V];
        load_vector<V>(v, x + c);
        part.add_below(v);
      }
      if (whole_vectors % kStep == mine)  // this thread has the last vocab % V logits
        for (int j = whole_vectors; j < vocab; ++j) part.add(to_float(x[j]));
    }
    part.merge_warp();
    warps[parity].put(part);
    __syncthreads();  // the next row uses the other WarpSums, so one barrier per row is enough
    const ExpSum whole = warps[parity].merge();
    const bool has_target = target >= 0 && target % kStep / V == threadIdx.x;  // the target is this thread's logit
    if (has_target) loss[row] = loss_of(whole, to_float(x[target]));
    if (target < 0 && threadIdx.x == 0) loss[row] = 0.0f;
    // Computes scale * exp(x - max) / sum, with x - max exact. The target's entry is corrected afterwards.
    const float log2_sum = log2f(whole.sum);
    const auto p = [&](float value) { return exp2_approx(fmaf(value - whole.max, kLog2e, -log2_sum)); };
    const int live = target < 0 ? 0 : vocab;  // number of columns that have a gradient
    T* const dx = dlogits + row * shape.dlogits_stride;
    for (int c = mine; c < columns; c += kStep) {
      float v[V];
      if (c + V <= live) {
        load_vector<V>(v, x + c);
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = scale * p(v[j]);
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = c + j < live ? scale * p(to_float(x[c + j])) : 0.0f;
      }
      store_vector<V>(dx + c, v);
    }
    if (has_target) dx[target] = from_float<T>(scale * (p(to_float(x[target])) - 1.0f));
    if (buffers == 1) load(buffer, row + gridDim.x, next_target);
    target = next_target;
    next_target = far_target;
  }
  copy_async_wait_group<0>();
}

// How many rows of logits fit into an SM's shared memory, at most 2; 0 if a row is too long or not aligned.
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
    cuda::cross_entropy_forward(ctx, loss, row_lse, logits, targets, vocab);
    return cuda::cross_entropy_backward(ctx, dlogits, logits, row_lse, targets, vocab, scale);
  }
  dispatch_gpu_float(logits.dtype, [&]<class T>() {
    const Logits shape = {logits.size(0), vocab, logits.size(1), logits.stride[0], dlogits.stride[0]};
    launch(ctx, "cross_entropy", cross_entropy_resident_kernel<T>, dim3(std::min<int64_t>(ctx.num_sms, shape.rows)),
           dim3(kResidentThreads), buffers * shape.columns * sizeof(T), loss.ptr<float>(), dlogits.ptr<T>(),
           logits.ptr<T>(), shape, targets.ptr<int32_t>(), buffers, scale);
  });
}

}  // namespace triad::cuda
