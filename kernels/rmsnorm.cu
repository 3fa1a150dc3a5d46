// RMSNorm on the GPU: a warp a row, a lane the 16-byte vectors lane, lane + 32, ... of it. The first four of a lane
// stay in registers between the two passes over the row (C <= 768 in bf16: all of it); what lies beyond comes again
// from L1.
//   forward   2 tensors of [N,C]: x in, y out.
//   backward  3 (dresidual: 4): dy, x in, dx out. dw sums over all rows: each warp keeps its sum of the whole row in
//             shared memory, where no other warp writes; a CTA adds its warps in order and leaves one slice in scratch,
//             partials.cuh adds the slices in order. Three CTAs an SM stay and walk over the rows, so the slices are
//             few. 72 KiB of sums a CTA: 8 warps up to C = 2304, fewer beyond, one up to C = 58,000.
#include <algorithm>

#include "kernels/bthd.cuh"
#include "kernels/partials.cuh"
#include "kernels/rmsnorm.h"

namespace triad::cuda {
namespace {

constexpr int kMaxWarps = 8;
constexpr int kCtasPerSm = 3;
constexpr int64_t kSumBytes = 72 * 1024;  // a CTA; three of them fit into the 227 KiB of an SM
constexpr int kHeld = 3;                  // vectors of a row that a lane keeps in registers

// A lane's part of one row. Held as loaded: as floats it would take twice the registers in bf16.
template <class T, int V>
class LaneRow {
 public:
  __device__ LaneRow(const T* row, int lane, int64_t vectors) : row_(row) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (row != nullptr && lane + 32 * i < vectors)
        held_[i] = *reinterpret_cast<const Word*>(row + (lane + 32 * i) * V);
  }
  // Vector `at` of the row, which is number i of this lane.
  __device__ void get(float (&x)[V], int i, int64_t at) const {
    if (i < kHeld)
      load_vector<V>(x, reinterpret_cast<const T*>(&held_[i]));
    else
      load_vector<V>(x, row_ + at * V);
  }
  // body(i, at) for each vector of this lane; i is a constant for the held ones, kHeld for the others.
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
__global__ void __launch_bounds__(32 * kMaxWarps)
    forward_kernel(T* __restrict__ y, int64_t y_stride, float* __restrict__ rrms, const T* __restrict__ x,
                   int64_t x_stride, const T* __restrict__ w, int64_t N, int64_t C, float eps) {
  using Row = LaneRow<T, V>;
  const int64_t row = int64_t{blockIdx.x} * kMaxWarps + threadIdx.x / 32, vectors = C / V;
  const int lane = threadIdx.x % 32;
  if (row >= N) return;
  const Row x_row(x + row * x_stride, lane, vectors);
  float sum = 0;
  Row::for_each(lane, vectors, [&](int i, int64_t at) {
    float v[V];
    x_row.get(v, i, at);
#pragma unroll
    for (int j = 0; j < V; ++j) sum = fmaf(v[j], v[j], sum);
  });
  const float r = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(C) + eps);
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

template <class T>
struct BackwardRows {
  T* dx;  // may be dy or dresidual: a lane reads what it needs of a vector before it writes the vector
  const T *dy, *x, *dresidual;
  int64_t dx_stride, dy_stride, x_stride, dresidual_stride;
};

template <class T, int V>
__global__ void __launch_bounds__(32 * kMaxWarps, kCtasPerSm)
    backward_kernel(BackwardRows<T> p, float* __restrict__ slices, const T* __restrict__ w,
                    const float* __restrict__ rrms, int64_t N, int64_t C) {
  using Row = LaneRow<T, V>;
  extern __shared__ float4 shared_memory[];
  float* const sums = reinterpret_cast<float*>(shared_memory);  // [warps][C]
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t vectors = C / V;
  float* const sum_row = sums + warp * C;  // a lane touches its own vectors only, so there is nothing to wait for
  Row::for_each(lane, vectors, [&](int, int64_t at) { store_vector<V>(sum_row + at * V, {}); });

  for (int64_t row = int64_t{blockIdx.x} * warps + warp; row < N; row += int64_t{gridDim.x} * warps) {
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
    });
  }

  __syncthreads();
  for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
    float sum = sums[c];
    for (int i = 1; i < warps; ++i) sum += sums[i * C + c];
    slices[blockIdx.x * C + c] = sum;
  }
}

}  // namespace

void rmsnorm_forward(Context& ctx, Tensor y, Tensor rrms, ConstTensor x, ConstTensor w, double eps) {
  const int64_t N = x.size(0), C = x.size(1);
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, y, x, w), [&]<int V>() {
      launch(ctx, "rmsnorm forward", forward_kernel<T, V>, dim3(ceil_div(N, kMaxWarps)), dim3(32 * kMaxWarps), 0,
             y.ptr<T>(), y.stride[0], rrms.ptr<float>(), x.ptr<T>(), x.stride[0], w.ptr<T>(), N, C, eps);
    });
  });
}

void rmsnorm_backward(Context& ctx, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor w,
                      ConstTensor rrms, ConstTensor dresidual) {
  const int64_t N = x.size(0), C = x.size(1), row_bytes = C * static_cast<int64_t>(sizeof(float));
  const int64_t warps = std::clamp<int64_t>(kSumBytes / row_bytes, 1, kMaxWarps);
  const int64_t ctas = std::min<int64_t>(ceil_div(N, warps), int64_t{kCtasPerSm} * ctx.num_sms);
  Scratch::Scope scope(ctx.scratch);
  const Tensor slices = scope.alloc(DType::f32, {ctas, C});
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    const BackwardRows<T> rows{
        dx.ptr<T>(),  dy.ptr<T>(),  x.ptr<T>(),  dresidual.empty() ? nullptr : dresidual.ptr<T>(),
        dx.stride[0], dy.stride[0], x.stride[0], dresidual.empty() ? 0 : dresidual.stride[0]};
    const bool vectors =
        all_have_vectors(kVector<T>, dx, dy, x, w) && (dresidual.empty() || has_vectors(dresidual, kVector<T>));
    dispatch_vector<T>(vectors, [&]<int V>() {
      launch(ctx, "rmsnorm backward", backward_kernel<T, V>, dim3(ctas), dim3(32 * warps), warps * row_bytes, rows,
             slices.ptr<float>(), w.ptr<T>(), rrms.ptr<float>(), N, C);
    });
  });
  add_partials(ctx, slices, {{.grad = dw}});
}

}  // namespace triad::cuda
