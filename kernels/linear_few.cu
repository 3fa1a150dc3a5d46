// y = x w^T for at most 8 rows of x: a warp an output column, a lane the 16-byte vectors lane, lane + 32, ... of its
// row of w. All time is reading w, once: 2.4 MB of a 1536 x 768 layer are 0.6 us of an H200's memory, and a CTA's wait
// for its first bytes about as long. So the first vectors of a warp's row are asked for before x is even looked at; x
// then goes to shared memory, normed by each CTA anew (its rows are few and in L2). Wide layers (the head) have more
// columns than the card has room for warps: CTAs stay and take further columns.
#include <algorithm>

#include "kernels/bthd.cuh"
#include "kernels/launch_behind.cuh"
#include "kernels/linear_few.h"
#include "kernels/ptx.cuh"

namespace triad::cuda {
namespace {

using Activation = FewOptions::Activation;
constexpr int kWarps = 8;      // a CTA; as many as rows, so that each norms one
constexpr int kHeld = 4;       // vectors of a lane in flight together
constexpr int kCtasPerSm = 6;  // that stay, of a wide layer
static_assert(kWarps >= kFewRows);

template <class T>
struct Few {
  T* y;
  const T *x, *w, *norm, *addend;
  int64_t y_stride, x_stride, w_stride, addend_stride;
  int rows, in, out;
  float eps;
};

// The first kHeld vectors of a lane from `from` on; zeros past the end.
template <class T>
struct HeldVectors {
  uint4 v[kHeld];
  __device__ void load(const T* row, int from, int vectors) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      v[i] =
          from + 32 * i < vectors ? reinterpret_cast<const uint4*>(row)[from + 32 * i] : make_uint4(0, 0, 0, 0);
  }
};

// A row of x, normed and rounded as the forward pass's own kernel does, to shared memory: warp n takes row n. Its first
// vectors are read once; those of the norm's weights were asked for before.
template <class T>
__device__ void load_rows(const Few<T>& a, const HeldVectors<T>& norm, T* shared) {
  constexpr int V = kVector<T>;
  const int vectors = a.in / V, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= a.rows) return;
  const T* const row = a.x + warp * a.x_stride;
  HeldVectors<T> held;
  held.load(row, lane, vectors);
  // get(x, from, i): vector from + 32 * i, of which the first kHeld of a lane are there
  const auto get = [&](float (&x)[V], const HeldVectors<T>& there, const T* all, int from, int i) {
    if (from == lane)
      as_floats<T>(x, there.v[i]);
    else
      load_vector<V>(x, all + (from + 32 * i) * V);
  };
  float r = 1;
  if (a.norm != nullptr) {
    float sum = 0;
    for (int from = lane; from < vectors; from += 32 * kHeld)
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (from + 32 * i >= vectors) break;
        float x[V];
        get(x, held, row, from, i);
#pragma unroll
        for (int j = 0; j < V; ++j) sum = fmaf(x[j], x[j], sum);
      }
    r = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(a.in) + a.eps);
  }
  for (int from = lane; from < vectors; from += 32 * kHeld)
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (from + 32 * i >= vectors) break;
      float x[V], weight[V];
      get(x, held, row, from, i);
      if (a.norm != nullptr) {
        get(weight, norm, a.norm, from, i);
#pragma unroll
        for (int j = 0; j < V; ++j) x[j] = x[j] * r * weight[j];
      }
      store_vector<V>(shared + warp * a.in + (from + 32 * i) * V, x);
    }
}

// sum[n] = row of w . row n of x; the row's first vectors are there already.
template <class T, int kRows>
__device__ void dot_rows(float (&sum)[kRows], const T* row, HeldVectors<T>& held, const T* x, int in, int lane) {
  constexpr int V = kVector<T>;
  const int vectors = in / V;
#pragma unroll
  for (int n = 0; n < kRows; ++n) sum[n] = 0;
  for (int from = lane; from < vectors; from += 32 * kHeld) {
    if (from > lane) held.load(row, from, vectors);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (from + 32 * i >= vectors) break;
      float w[V];
      as_floats<T>(w, held.v[i]);
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        float xv[V];
        load_vector<V>(xv, x + n * in + (from + 32 * i) * V);
#pragma unroll
        for (int j = 0; j < V; ++j) sum[n] = fmaf(w[j], xv[j], sum[n]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kRows; ++n) sum[n] = warp_sum(sum[n]);
}

template <class T>
__device__ float silu_of_rounded(float x) {
  x = to_float(from_float<T>(x));
  return x / (1.0f + expf(-x));
}

template <class T, int kRows, Activation kActivation>
__global__ void __launch_bounds__(32 * kWarps, 2) linear_few_kernel(Few<T> a) {
  T* const x = reinterpret_cast<T*>(dynamic_shared());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = a.in / kVector<T>;
  int column = static_cast<int>(blockIdx.x) * kWarps + warp;
  const auto row_of = [&](int i) { return a.w + i * a.w_stride; };
  HeldVectors<T> held;
  if (column < a.out) held.load(row_of(column), lane, vectors);
  HeldVectors<T> norm;
  if (a.norm != nullptr && warp < a.rows) norm.load(a.norm, lane, vectors);
  let_next_come();
  wait_for_kernel_ahead();  // w and norm are weights; x and the addend are what the kernel before has written
  load_rows(a, norm, x);
  __syncthreads();
  for (; column < a.out; column += static_cast<int>(gridDim.x) * kWarps) {
    if (column >= static_cast<int>(gridDim.x) * kWarps) held.load(row_of(column), lane, vectors);
    float sum[kRows];
    dot_rows(sum, row_of(column), held, x, a.in, lane);
    if constexpr (kActivation == Activation::silu) {
#pragma unroll
      for (int n = 0; n < kRows; ++n) sum[n] = silu_of_rounded<T>(sum[n]);
    }
    if constexpr (kActivation == Activation::swiglu) {
      float up[kRows];
      held.load(row_of(a.out + column), lane, vectors);
      dot_rows(up, row_of(a.out + column), held, x, a.in, lane);
#pragma unroll
      for (int n = 0; n < kRows; ++n) sum[n] = silu_of_rounded<T>(sum[n]) * to_float(from_float<T>(up[n]));
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      if (lane != n || n >= a.rows) continue;
      if (a.addend != nullptr) sum[n] += to_float(a.addend[n * a.addend_stride + column]);
      a.y[n * a.y_stride + column] = from_float<T>(sum[n]);
    }
  }
}

template <class T, int kRows, Activation kActivation>
void launch_few(Context& ctx, const Few<T>& a) {
  const int64_t ctas = std::min<int64_t>(ceil_div(a.out, kWarps), int64_t{ctx.num_sms} * kCtasPerSm);
  launch_behind(ctx, "linear_few", linear_few_kernel<T, kRows, kActivation>, dim3(static_cast<unsigned>(ctas)),
         dim3(32 * kWarps), static_cast<size_t>(kRows * a.in) * sizeof(T), a);
}

template <class T, Activation kActivation>
void dispatch_rows(Context& ctx, const Few<T>& a) {
  if (a.rows == 1) return launch_few<T, 1, kActivation>(ctx, a);
  if (a.rows <= 2) return launch_few<T, 2, kActivation>(ctx, a);
  if (a.rows <= 4) return launch_few<T, 4, kActivation>(ctx, a);
  launch_few<T, 8, kActivation>(ctx, a);
}

}  // namespace

bool linear_few(Context& ctx, Tensor y, ConstTensor x, ConstTensor w, const FewOptions& o) {
  constexpr int64_t kMostShared = 96 * 1024;  // two CTAs an SM
  const int64_t rows = x.size(0), in = x.size(1), padded = rows == 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8;
  const int V = static_cast<int>(16 / size_of(x.dtype));
  if (rows > kFewRows || padded * in * size_of(x.dtype) > kMostShared || !has_vectors(x, V) || !has_vectors(w, V))
    return false;
  if (!o.norm.empty() && !has_vectors(o.norm, V)) return false;
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    Few<T> a{.y = y.ptr<T>(),
             .x = x.ptr<T>(),
             .w = w.ptr<T>(),
             .norm = o.norm.empty() ? nullptr : o.norm.ptr<T>(),
             .addend = o.addend.empty() ? nullptr : o.addend.ptr<T>(),
             .y_stride = y.stride[0],
             .x_stride = x.stride[0],
             .w_stride = w.stride[0],
             .addend_stride = o.addend.empty() ? 0 : o.addend.stride[0],
             .rows = static_cast<int>(rows),
             .in = static_cast<int>(in),
             .out = static_cast<int>(y.size(1)),
             .eps = static_cast<float>(o.eps)};
    switch (o.activation) {
      case Activation::none:
        return dispatch_rows<T, Activation::none>(ctx, a);
      case Activation::silu:
        return dispatch_rows<T, Activation::silu>(ctx, a);
      case Activation::swiglu:
        return dispatch_rows<T, Activation::swiglu>(ctx, a);
    }
  });
  return true;
}

}  // namespace triad::cuda
