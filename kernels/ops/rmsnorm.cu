// RMSNorm on the GPU, one warp per row. A lane processes the row's 16-byte vectors lane, lane + 32, .... Its first
// three vectors stay in registers between the two passes over the row; later ones are read again, from L1. Rows with at
// most three vectors per lane (C <= 768 in bf16) have their own kernels, which keep everything in registers.
//   forward   Moves 2 tensors [N,C]: x in, y out.
//             To e4m3: half of y. Normed rows are computed twice, for the largest element and for the bytes.
//   backward  Moves 3: dy, x in, dx out (5 in a layer, with dresidual in and y out). dw sums over all rows: each warp
//             sums its rows, in registers if they suffice, otherwise in its own part of shared memory. A CTA adds its
//             warps in order and writes one slice to scratch; partials.cuh adds the slices in order. Two persistent
//             CTAs per SM loop over the rows, so there are few slices. On Hopper a CTA has 108 KiB of shared memory for
//             sums: 8 warps up to C = 3,456, fewer beyond, one up to C = 58,000. Other cards have less.
#include <algorithm>

#include "kernels/common/block_order.cuh"
#include "kernels/common/partials.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/ops/cast_e4m3.cuh"
#include "kernels/ops/rmsnorm.h"

namespace triad::cuda {
namespace {

constexpr int kMaxWarps = 8;
constexpr int kCtasPerSm = 2;              // resident CTAs per SM in backward
constexpr int64_t kSumBytes = 108 * 1024;  // bytes for sums per CTA, at most
constexpr int kHeld = 3;                   // row vectors that a lane keeps in registers
constexpr int kForwardRows = 2;            // rows per warp, whose loads are in flight together

// A lane's part of one row, kept as loaded: converted to floats, bf16 would take twice as many registers.
template <class T, int V>
class LaneRow {
 public:
  __device__ LaneRow(const T* row, int lane, int64_t vectors) : row_(row) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (row != nullptr && lane + 32 * i < vectors)
        held_[i] = *reinterpret_cast<const Word*>(row + (lane + 32 * i) * V);
  }
  // Unpacks the row's vector `at`, which is this lane's i-th vector.
  __device__ void get(float (&x)[V], int i, int64_t at) const {
    if (i < kHeld)
      load_vector<V>(x, reinterpret_cast<const T*>(&held_[i]));
    else
      load_vector<V>(x, row_ + at * V);
  }
  // Calls body(i, at) for each of this lane's vectors. i is a compile-time constant for those in registers and kHeld
  // for the others.
  template <class Body>
  __device__ static void for_each(int lane, int64_t vectors, Body&& body) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (lane + 32 * i < vectors) body(i, int64_t{lane + 32 * i});
    for (int64_t at = lane + 32 * kHeld; at < vectors; at += 32) body(kHeld, at);
  }

 private:
  using Word = std::conditional_t<V == 1, T, uint4>;
  const T* row_;
  Word held_[kHeld];
};

template <class T, int V>
__device__ __forceinline__ float rrms_of(const LaneRow<T, V>& row, int lane, int64_t vectors, int64_t C, float eps) {
  float sum = 0;
  LaneRow<T, V>::for_each(lane, vectors, [&](int i, int64_t at) {
    float v[V];
    row.get(v, i, at);
#pragma unroll
    for (int j = 0; j < V; ++j) sum = fmaf(v[j], v[j], sum);
  });
  return 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(C) + eps);
}

template <class T, int V>
__global__ void __launch_bounds__(32 * kMaxWarps)
    rmsnorm_forward_kernel(T* __restrict__ y, int64_t y_stride, float* __restrict__ rrms, const T* __restrict__ x,
                           int64_t x_stride, const T* __restrict__ w, int64_t N, int64_t C, float eps) {
  using Row = LaneRow<T, V>;
  const int64_t row = int64_t{block_from_end()} * kMaxWarps + threadIdx.x / 32, vectors = C / V;
  const int lane = threadIdx.x % 32;
  if (row >= N) return;
  const Row x_row(x + row * x_stride, lane, vectors);
  const float r = rrms_of(x_row, lane, vectors, C, eps);
  if (lane == 0) rrms[row] = r;
  Row::for_each(lane, vectors, [&](int i, int64_t at) {
    float v[V], weight[V];
    x_row.get(v, i, at);
    load_vector<V>(weight, w + at * V);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = v[j] * r * weight[j];
    store_vector<V>(y + row * y_stride + at * V, v);
  });
}

// The sums have the order of the kernel that rmsnorm_forward() takes for C elements, so that y has its bits: both add a
// lane's vectors in order, then the lanes.
__global__ void __launch_bounds__(32 * kMaxWarps)
    rmsnorm_forward_e4m3_kernel(uint8_t* __restrict__ q, float* __restrict__ scale, float* __restrict__ rrms,
                                const __nv_bfloat16* __restrict__ x, int64_t x_stride,
                                const __nv_bfloat16* __restrict__ w, int64_t N, int64_t C, float eps) {
  constexpr int V = kE4m3Vector;
  using Row = LaneRow<__nv_bfloat16, V>;
  const int64_t row = int64_t{block_from_end()} * kMaxWarps + threadIdx.x / 32, vectors = C / V;
  const int lane = threadIdx.x % 32;
  if (row >= N) return;
  const Row x_row(x + row * x_stride, lane, vectors);
  const float r = rrms_of(x_row, lane, vectors, C, eps);
  if (lane == 0) rrms[row] = r;
  const auto normed = [&](int i, int64_t at) {
    float v[V], weight[V];
    x_row.get(v, i, at);
    load_vector<V>(weight, w + at * V);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = v[j] * r * weight[j];
    return packed(v);
  };
  uint32_t largest = 0;
  Row::for_each(lane, vectors, [&](int i, int64_t at) { largest = max(largest, largest_of(normed(i, at))); });
  const E4m3Scale its(warp_largest(largest));
  if (lane == 0) scale[row] = its.value();
  Row::for_each(lane, vectors,
                [&](int i, int64_t at) { *reinterpret_cast<uint2*>(q + row * C + at * V) = its.cast(normed(i, at)); });
}

// Loads a lane's row vectors into registers, with zeros past the row's end.
template <int V, class T, int kWords>
__device__ __forceinline__ void read_row(uint4 (&to)[kWords], const T* row, int lane, int vectors) {
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    to[i] =
        lane + 32 * i < vectors ? *reinterpret_cast<const uint4*>(row + (lane + 32 * i) * V) : make_uint4(0, 0, 0, 0);
}

template <class T, int kWords>
__global__ void __launch_bounds__(32 * kMaxWarps)
    rmsnorm_forward_in_registers_kernel(T* __restrict__ y, int64_t y_stride, float* __restrict__ rrms,
                                        const T* __restrict__ x, int64_t x_stride, const T* __restrict__ w, int64_t N,
                                        int C, float eps) {
  constexpr int V = kVector<T>;
  const int64_t first = (int64_t{block_from_end()} * kMaxWarps + threadIdx.x / 32) * kForwardRows;
  const int lane = threadIdx.x % 32, vectors = C / V;
  uint4 rows[kForwardRows][kWords], weights[kWords];
#pragma unroll
  for (int k = 0; k < kForwardRows; ++k) read_row<V>(rows[k], x + min(first + k, N - 1) * x_stride, lane, vectors);
  read_row<V>(weights, w, lane, vectors);
#pragma unroll
  for (int k = 0; k < kForwardRows; ++k) {
    if (first + k >= N) return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      float v[V];
      as_floats<T>(v, rows[k][i]);
#pragma unroll
      for (int j = 0; j < V; ++j) sum = fmaf(v[j], v[j], sum);
    }
    const float r = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(C) + eps);
    if (lane == 0) rrms[first + k] = r;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (lane + 32 * i >= vectors) break;
      float v[V], weight[V];
      as_floats<T>(v, rows[k][i]), as_floats<T>(weight, weights[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) v[j] = v[j] * r * weight[j];
      store_vector<V>(y + (first + k) * y_stride + (lane + 32 * i) * V, v);
    }
  }
}

template <class T>
struct BackwardRows {
  T *dx, *y;  // dx may be the same tensor as dy or dresidual: a lane reads each vector before it writes it
  const T *dy, *x, *dresidual;
  int64_t dx_stride, y_stride, dy_stride, x_stride, dresidual_stride;
};

// Backward for rows with at most kWords vectors per lane, with inputs, weights and the lane's sums for dw in registers.
// kInLayer: as in a layer, p.dresidual is added to dx and the normed rows are written to p.y; false: both are null.
template <class T, int kWords, bool kInLayer>
__global__ void __launch_bounds__(32 * kMaxWarps, kCtasPerSm)
    rmsnorm_backward_in_registers_kernel(BackwardRows<T> p, float* __restrict__ slices, const T* __restrict__ w,
                                         const float* __restrict__ rrms, int64_t N, int C) {
  constexpr int V = kVector<T>;
  extern __shared__ float4 shared_memory[];
  float* const sums = reinterpret_cast<float*>(shared_memory);  // [warps][C]; written after the loop over rows
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = C / V;
  uint4 weights[kWords];
  read_row<V>(weights, w, lane, vectors);
  float sum[kWords][V] = {};
  const float share = 1.0f / static_cast<float>(C);

  // The loop goes from the last row to the first, because L2 may hold the last rows (common/block_order.cuh).
  for (int64_t row = N - 1 - (int64_t{blockIdx.x} * kMaxWarps + warp); row >= 0;
       row -= int64_t{gridDim.x} * kMaxWarps) {
    uint4 dys[kWords], xs[kWords], arounds[kWords];
    read_row<V>(dys, p.dy + row * p.dy_stride, lane, vectors);
    read_row<V>(xs, p.x + row * p.x_stride, lane, vectors);
    if constexpr (kInLayer) read_row<V>(arounds, p.dresidual + row * p.dresidual_stride, lane, vectors);
    const float r = rrms[row];
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      float dy[V], x[V], weight[V];
      as_floats<T>(dy, dys[i]), as_floats<T>(x, xs[i]), as_floats<T>(weight, weights[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float x_dy = x[j] * dy[j];
        sum[i][j] = fmaf(x_dy, r, sum[i][j]);
        dot = fmaf(x_dy, weight[j], dot);
      }
    }
    const float slope = r * r * warp_sum(dot) * share;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (lane + 32 * i >= vectors) break;
      const int64_t at = (lane + 32 * i) * V;
      float dy[V], x[V], weight[V], out[V];
      as_floats<T>(dy, dys[i]), as_floats<T>(x, xs[i]), as_floats<T>(weight, weights[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) out[j] = r * (dy[j] * weight[j] - x[j] * slope);
      if constexpr (kInLayer) {
        float around[V];
        as_floats<T>(around, arounds[i]);
#pragma unroll
        for (int j = 0; j < V; ++j) out[j] += around[j];
      }
      store_vector<V>(p.dx + row * p.dx_stride + at, out);
      if constexpr (kInLayer) {
#pragma unroll
        for (int j = 0; j < V; ++j) out[j] = x[j] * r * weight[j];
        store_vector<V>(p.y + row * p.y_stride + at, out);
      }
    }
  }
  pdl_trigger();
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    if (lane + 32 * i < vectors) store_vector<V>(sums + warp * C + (lane + 32 * i) * V, sum[i]);
  __syncthreads();
  for (int c = threadIdx.x; c < C; c += 32 * kMaxWarps) {
    float total = sums[c];
#pragma unroll
    for (int i = 1; i < kMaxWarps; ++i) total += sums[i * C + c];
    slices[int64_t{blockIdx.x} * C + c] = total;
  }
}

template <class T, int V>
__global__ void __launch_bounds__(32 * kMaxWarps, kCtasPerSm)
    rmsnorm_backward_kernel(BackwardRows<T> p, float* __restrict__ slices, const T* __restrict__ w,
                            const float* __restrict__ rrms, int64_t N, int64_t C) {
  using Row = LaneRow<T, V>;
  extern __shared__ float4 shared_memory[];
  float* const sums = reinterpret_cast<float*>(shared_memory);  // [warps][C]
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t vectors = C / V;
  float* const sum_row = sums + warp * C;  // a lane accesses only its own vectors, so no barrier is needed
  Row::for_each(lane, vectors, [&](int, int64_t at) { store_vector<V>(sum_row + at * V, {}); });

  // The loop goes from the last row to the first, because L2 may hold the last rows (common/block_order.cuh).
  for (int64_t row = N - 1 - (int64_t{blockIdx.x} * warps + warp); row >= 0; row -= int64_t{gridDim.x} * warps) {
    const Row dy_row(p.dy + row * p.dy_stride, lane, vectors), x_row(p.x + row * p.x_stride, lane, vectors);
    const Row around_row(p.dresidual == nullptr ? nullptr : p.dresidual + row * p.dresidual_stride, lane, vectors);
    const float r = rrms[row];
    float dot = 0;
    Row::for_each(lane, vectors, [&](int i, int64_t at) {
      float dy[V], x[V], weight[V], sum[V];
      dy_row.get(dy, i, at);
      x_row.get(x, i, at);
      load_vector<V>(weight, w + at * V);
      load_vector<V>(sum, sum_row + at * V);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float x_dy = x[j] * dy[j];
        sum[j] = fmaf(x_dy, r, sum[j]);
        dot = fmaf(x_dy, weight[j], dot);
      }
      store_vector<V>(sum_row + at * V, sum);
    });
    const float slope = r * r * warp_sum(dot) / static_cast<float>(C);
    Row::for_each(lane, vectors, [&](int i, int64_t at) {
      float dy[V], x[V], weight[V], dx[V];
      dy_row.get(dy, i, at);
      x_row.get(x, i, at);
      load_vector<V>(weight, w + at * V);
#pragma unroll
      for (int j = 0; j < V; ++j) dx[j] = r * (dy[j] * weight[j] - x[j] * slope);
      if (p.dresidual != nullptr) {
        float around[V];
        around_row.get(around, i, at);
#pragma unroll
        for (int j = 0; j < V; ++j) dx[j] += around[j];
      }
      store_vector<V>(p.dx + row * p.dx_stride + at * V, dx);
      if (p.y == nullptr) return;
#pragma unroll
      for (int j = 0; j < V; ++j) dx[j] = x[j] * r * weight[j];
      store_vector<V>(p.y + row * p.y_stride + at * V, dx);
    });
  }

  pdl_trigger();
  __syncthreads();
  for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
    float sum = sums[c];
    for (int i = 1; i < warps; ++i) sum += sums[i * C + c];
    slices[blockIdx.x * C + c] = sum;
  }
}

// Whether C-element rows fit the kernels that keep them in registers, which are compiled for bf16 only.
template <class T>
bool fits_registers(int64_t C) {
  return !std::is_same_v<T, float> && C <= 32 * kHeld * kVector<T>;
}
// Calls f.template operator()<n>() with n = how many 16-byte vectors a lane holds from a row with C elements.
template <class T, class F>
void dispatch_words(int64_t C, F&& f) {
  if constexpr (!std::is_same_v<T, float>) {
    static_assert(kHeld == 3);
    switch (ceil_div(C, 32 * kVector<T>)) {
      case 1:
        return f.template operator()<1>();
      case 2:
        return f.template operator()<2>();
      default:
        return f.template operator()<3>();
    }
  }
}

}  // namespace

void rmsnorm_forward(Context& ctx, Tensor y, Tensor rrms, ConstTensor x, ConstTensor w, double eps) {
  const int64_t N = x.size(0), C = x.size(1);
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    const bool vectors = all_have_vectors(kVector<T>, y, x, w);
    if (vectors && fits_registers<T>(C))
      return dispatch_words<T>(C, [&]<int kWords>() {
        launch(ctx, "rmsnorm forward", rmsnorm_forward_in_registers_kernel<T, kWords>,
               dim3(ceil_div(N, kMaxWarps * kForwardRows)), dim3(32 * kMaxWarps), 0, y.ptr<T>(), y.stride[0],
               rrms.ptr<float>(), x.ptr<T>(), x.stride[0], w.ptr<T>(), N, C, eps);
      });
    dispatch_vector<T>(vectors, [&]<int V>() {
      launch(ctx, "rmsnorm forward", rmsnorm_forward_kernel<T, V>, dim3(ceil_div(N, kMaxWarps)), dim3(32 * kMaxWarps),
             0, y.ptr<T>(), y.stride[0], rrms.ptr<float>(), x.ptr<T>(), x.stride[0], w.ptr<T>(), N, C, eps);
    });
  });
}

bool rmsnorm_forward_e4m3(Context& ctx, const E4m3Rows& y, const Tensor& rrms, const ConstTensor& x,
                          const ConstTensor& w, double eps) {
  if (!all_have_vectors(kE4m3Vector, x, w)) return false;
  const int64_t N = x.size(0), C = x.size(1);
  launch(ctx, "rmsnorm forward e4m3", rmsnorm_forward_e4m3_kernel, dim3(ceil_div(N, kMaxWarps)), dim3(32 * kMaxWarps),
         0, y.q.ptr<uint8_t>(), y.scale.ptr<float>(), rrms.ptr<float>(), x.ptr<__nv_bfloat16>(), x.stride[0],
         w.ptr<__nv_bfloat16>(), N, C, eps);
  return true;
}

void rmsnorm_backward(Context& ctx, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor w,
                      ConstTensor rrms, ConstTensor dresidual, Tensor y) {
  const int64_t N = x.size(0), C = x.size(1), row_bytes = C * static_cast<int64_t>(sizeof(float));
  const int64_t sum_bytes = std::min(kSumBytes, shared_limits(ctx).bytes_per_cta(kCtasPerSm));
  const int64_t warps = std::clamp<int64_t>(sum_bytes / row_bytes, 1, kMaxWarps);
  check_shared(ctx, "rmsnorm_backward", warps * row_bytes, "rows of {} elements", C);
  const int64_t ctas = std::min<int64_t>(ceil_div(N, warps), int64_t{kCtasPerSm} * ctx.num_sms);
  Scratch::Scope scope(ctx.scratch);
  const Tensor slices = scope.alloc(DType::f32, {ctas, C});
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    const auto pointer = [](auto t) { return t.empty() ? nullptr : t.template ptr<T>(); };
    const BackwardRows<T> rows{dx.ptr<T>(),  pointer(y),  dy.ptr<T>(),  x.ptr<T>(),  pointer(dresidual),
                               dx.stride[0], y.stride[0], dy.stride[0], x.stride[0], dresidual.stride[0]};
    const auto fits = [](const ConstTensor& t) { return t.empty() || has_vectors(t, kVector<T>); };
    const bool vectors = all_have_vectors(kVector<T>, dx, dy, x, w) && fits(dresidual) && fits(y);
    if (vectors && fits_registers<T>(C) && dresidual.empty() == y.empty())
      return dispatch_words<T>(C, [&]<int kWords>() {
        launch(ctx, "rmsnorm backward",
               y.empty() ? rmsnorm_backward_in_registers_kernel<T, kWords, false>
                         : rmsnorm_backward_in_registers_kernel<T, kWords, true>,
               dim3(ctas), dim3(32 * kMaxWarps), kMaxWarps * row_bytes, rows, slices.ptr<float>(), w.ptr<T>(),
               rrms.ptr<float>(), N, C);
      });
    dispatch_vector<T>(vectors, [&]<int V>() {
      launch(ctx, "rmsnorm backward", rmsnorm_backward_kernel<T, V>, dim3(ctas), dim3(32 * warps), warps * row_bytes,
             rows, slices.ptr<float>(), w.ptr<T>(), rrms.ptr<float>(), N, C);
    });
  });
  add_partials(ctx, slices, {{.grad = dw}});
}

}  // namespace triad::cuda
