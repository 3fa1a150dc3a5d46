// QK-norm on the GPU, bound by memory: forward moves x in and y out, backward dy and x in and dx out. kLanes lanes
// share a head and keep it in registers, up to kPieces vectors per lane; the heads of a token are adjacent in memory,
// so a warp reads whole lines.
//   forward   One launch for the queries and all keys. It may work in place: a lane writes only what it has read.
//   backward  A lane also adds the weights' gradients of its elements, first for the queries, then for each branch's
//             keys. A CTA adds its lanes in order and writes one slice [P*D]; partials.cuh adds the slices in order.
//             The CTAs are persistent, kCtasPerSm per SM, so the slices are few.
#include <algorithm>

#include "kernels/common/bthd.cuh"
#include "kernels/common/partials.cuh"
#include "kernels/ops/qk_norm.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kMaxParts = 4;
constexpr int64_t kCtasPerSm = 4;

// The queries, or one branch's keys. Forward uses no dy; out is y or dx.
template <class T>
struct Part {
  Bthd<T> out;
  Bthd<const T> x, dy;
  int heads;
};
template <class T>
struct Problem {
  Part<T> parts[kMaxParts];  // entries past the last part have no heads
  const T* w;
  int count, all_heads, tokens, T_len, D;  // T_len: tokens per sequence
  float eps;
};

// A lane's elements of one head: V-element vectors lane, lane + kLanes, ...; zeros beyond the head's end.
template <int V, int kLanes, int kPieces>
struct LaneHead {
  float at[kPieces][V];
  template <class T>
  __device__ __forceinline__ void load(const T* row, int lane, int D, bool inside) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int j = (lane + kLanes * i) * V;
      if (inside && j < D) {
        load_vector<V>(at[i], row + j);
      } else {
#pragma unroll
        for (int k = 0; k < V; ++k) at[i][k] = 0;
      }
    }
  }
  template <class T>
  __device__ __forceinline__ void store(T* row, int lane, int D) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if ((lane + kLanes * i) * V < D) store_vector<V>(row + (lane + kLanes * i) * V, at[i]);
  }
  // 1 / sqrt(mean(x^2) + eps), in every lane that shares the head.
  __device__ __forceinline__ float inverse_rms(int D, float eps) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int k = 0; k < V; ++k) sum = fmaf(at[i][k], at[i][k], sum);
    return 1.0f / sqrtf(warp_sum<kLanes>(sum) / static_cast<float>(D) + eps);
  }
};

template <class T, int V, int kLanes, int kPieces>
__global__ void __launch_bounds__(kThreads) qk_norm_forward_kernel(Problem<T> a) {
  using Head = LaneHead<V, kLanes, kPieces>;
  const uint32_t item = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const uint32_t token = item / a.all_heads, b = token / a.T_len, t = token % a.T_len;
  const int lane = threadIdx.x % kLanes;
  const bool inside = token < static_cast<uint32_t>(a.tokens);
  int h = static_cast<int>(item % a.all_heads), p = 0;
  Part<T> part = a.parts[0];
#pragma unroll
  for (int i = 1; i < kMaxParts; ++i)
    if (h >= part.heads) h -= part.heads, part = a.parts[i], p = i;
  Head x, w;
  x.load(part.x.row(b, t, h), lane, a.D, inside);
  w.load(a.w + p * a.D, lane, a.D, true);
  const float r = x.inverse_rms(a.D, a.eps);
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
#pragma unroll
    for (int k = 0; k < V; ++k) x.at[i][k] = x.at[i][k] * r * w.at[i][k];
  if (inside) x.store(part.out.row(b, t, h), lane, a.D);
}

// Backward for one part's heads, by the whole CTA: writes dx, and the CTA's sum for dw to slice [D].
template <class T, int V, int kLanes, int kPieces>
__device__ __forceinline__ void part_backward(const Problem<T>& a, const Part<T>& part, const T* weights, float* sums,
                                              float* slice) {
  using Head = LaneHead<V, kLanes, kPieces>;
  constexpr int kSlots = kThreads / kLanes, kWidth = kLanes * V * kPieces;  // heads at a time; elements per slot
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
  const uint32_t items = static_cast<uint32_t>(a.tokens) * part.heads;
  const float share = 1.0f / static_cast<float>(a.D);
  Head w;
  w.load(weights, lane, a.D, true);
  float sum[kPieces][V] = {};
  // The bound is the same for all threads, because warp_sum() needs all of a warp's lanes.
  for (uint32_t first = blockIdx.x * kSlots; first < items; first += gridDim.x * kSlots) {
    const uint32_t item = first + slot, token = item / part.heads, h = item % part.heads;
    const uint32_t b = token / a.T_len, t = token % a.T_len;
    const bool inside = item < items;
    Head x, dy;
    x.load(part.x.row(b, t, h), lane, a.D, inside);
    dy.load(part.dy.row(b, t, h), lane, a.D, inside);
    const float r = x.inverse_rms(a.D, a.eps);
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const float x_dy = x.at[i][k] * dy.at[i][k];
        sum[i][k] = fmaf(x_dy, r, sum[i][k]);
        dot = fmaf(x_dy, w.at[i][k], dot);
      }
    const float slope = r * r * warp_sum<kLanes>(dot) * share;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int k = 0; k < V; ++k) dy.at[i][k] = r * (dy.at[i][k] * w.at[i][k] - x.at[i][k] * slope);
    if (inside) dy.store(part.out.row(b, t, h), lane, a.D);
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
#pragma unroll
    for (int k = 0; k < V; ++k) sums[slot * kWidth + (lane + kLanes * i) * V + k] = sum[i][k];
  __syncthreads();
  for (int j = threadIdx.x; j < a.D; j += kThreads) {
    float total = sums[j];
#pragma unroll
    for (int i = 1; i < kSlots; ++i) total += sums[i * kWidth + j];
    slice[j] = total;
  }
  __syncthreads();  // the next part writes sums again
}

template <class T, int V, int kLanes, int kPieces>
__global__ void __launch_bounds__(kThreads) qk_norm_backward_kernel(Problem<T> a, float* __restrict__ slices) {
  __shared__ float sums[kThreads * V * kPieces];
  float* const slice = slices + int64_t{blockIdx.x} * a.count * a.D;
#pragma unroll
  for (int p = 0; p < kMaxParts; ++p)
    if (p < a.count) part_backward<T, V, kLanes, kPieces>(a, a.parts[p], a.w + p * a.D, sums, slice + p * a.D);
  pdl_trigger();
}

template <class T>
Problem<T> problem(const QkHeads& out, const ConstQkHeads& dy, const ConstQkHeads& x, const ConstTensor& w,
                   double eps) {
  Problem<T> a{};
  a.w = w.ptr<T>();
  a.tokens = static_cast<int>(x[0].size(0) * x[0].size(1)), a.T_len = static_cast<int>(x[0].size(1));
  a.D = static_cast<int>(x[0].size(3)), a.eps = static_cast<float>(eps);
  for (; a.count < kMaxParts && !x[static_cast<size_t>(a.count)].empty(); ++a.count) {
    const auto p = static_cast<size_t>(a.count);
    a.parts[p] = {bthd<T>(out[p]), bthd<T>(x[p]), dy[p].empty() ? Bthd<const T>{} : bthd<T>(dy[p]),
                  static_cast<int>(x[p].size(2))};
    a.all_heads += a.parts[p].heads;
  }
  return a;
}

// Whether all heads consist of aligned 16-byte vectors.
template <class T>
bool fits_vectors(const QkHeads& out, const ConstQkHeads& dy, const ConstQkHeads& x, const ConstTensor& w) {
  const auto fits = [](const ConstTensor& t) { return t.empty() || has_vectors(t, kVector<T>); };
  return fits(w) && std::all_of(out.begin(), out.end(), fits) && std::all_of(dy.begin(), dy.end(), fits) &&
         std::all_of(x.begin(), x.end(), fits);
}

// Calls f.template operator()<V, lanes per head, vectors per lane>() for D-element heads.
template <class T, class F>
void dispatch_head(bool vectors, int64_t D, F&& f) {
  constexpr int V = kVector<T>;
  static_assert(kMaxNormedWidth <= 32 * 8);
  if (!vectors) return f.template operator()<1, 32, 8>();
  if (D <= 8 * V) return f.template operator()<V, 8, 1>();
  if (D <= 16 * V) return f.template operator()<V, 16, 1>();
  if (D <= 32 * V) return f.template operator()<V, 32, 1>();
  if constexpr (32 * V < kMaxNormedWidth) f.template operator()<V, 32, 2>();
}

}  // namespace

void qk_norm_forward(Context& ctx, const QkHeads& y, const ConstQkHeads& x, ConstTensor w, double eps) {
  dispatch_gpu_float(w.dtype, [&]<class T>() {
    const Problem<T> a = problem<T>(y, {}, x, w, eps);
    dispatch_head<T>(fits_vectors<T>(y, {}, x, w), a.D, [&]<int V, int kLanes, int kPieces>() {
      launch(ctx, "qk_norm forward", qk_norm_forward_kernel<T, V, kLanes, kPieces>,
             dim3(static_cast<unsigned>(ceil_div(int64_t{a.tokens} * a.all_heads, kThreads / kLanes))), dim3(kThreads),
             0, a);
    });
  });
}

void qk_norm_backward(Context& ctx, const QkHeads& dx, Tensor dw, const ConstQkHeads& dy, const ConstQkHeads& x,
                      ConstTensor w, double eps) {
  dispatch_gpu_float(w.dtype, [&]<class T>() {
    const Problem<T> a = problem<T>(dx, dy, x, w, eps);
    // The same for any alignment, which a plan does not know: a CTA for each 8 heads, one per warp.
    const int64_t ctas =
        std::clamp<int64_t>(ceil_div(int64_t{a.tokens} * a.parts[0].heads, kThreads / 32), 1, kCtasPerSm * ctx.num_sms);
    dispatch_head<T>(fits_vectors<T>(dx, dy, x, w), a.D, [&]<int V, int kLanes, int kPieces>() {
      Scratch::Scope scope(ctx.scratch);
      const Tensor slices = scope.alloc(DType::f32, {ctas, dw.size(0)});
      launch(ctx, "qk_norm backward", qk_norm_backward_kernel<T, V, kLanes, kPieces>, dim3(static_cast<unsigned>(ctas)),
             dim3(kThreads), 0, a, slices.ptr<float>());
      add_partials(ctx, slices, {{.grad = dw}});
    });
  });
}

}  // namespace triad::cuda
