// y = x w^T for at most 8 rows of x, bound by reading w once (for 2 to 64 rows in bf16: decode/skinny_linear_mma.cu). A
// warp computes some columns of y; its lanes read the 16-byte vectors lane, lane + 32, ... in w's corresponding rows.
// For a single layer, latency matters as much as bandwidth. So a warp issues 12 vector loads per lane before it reads
// x, while the previous kernel still runs: they read 4 columns if rows are short and there are enough columns to occupy
// most SMs, otherwise 6 KB in one column's row. x then goes to shared memory, and every CTA normalises it again (its
// rows are few and in L2). For layers with more columns than the card has room for warps (the vocabulary head), CTAs
// are persistent and loop over columns.
#include <algorithm>

#include "kernels/common/launch_pdl.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/decode/skinny_linear.cuh"

namespace triad::cuda {
namespace {

using Activation = SkinnyLinearOptions::Activation;
constexpr int kWarps = 8;        // warps per CTA; at least as many as rows, since a warp normalises one row
constexpr int kEnoughCtas = 48;  // fewest CTAs for which a warp computes four columns
static_assert(kWarps >= kFewRows);

// A lane's vectors from, from + 32, ... in several rows, in registers, with zeros past the row end.
template <int kRowsHeld, int kPieces>
struct HeldVectors {
  uint4 v[kRowsHeld][kPieces];
  template <class T>
  __device__ void load(const T* row, int64_t stride, int rows, int from, int vectors) {
#pragma unroll
    for (int r = 0; r < kRowsHeld; ++r)
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        v[r][i] = r < rows && from + 32 * i < vectors ? reinterpret_cast<const uint4*>(row + r * stride)[from + 32 * i]
                                                      : make_uint4(0, 0, 0, 0);
  }
};

// Copies `count` rows with `vectors` 16-byte vectors each to shared memory, one after the other.
template <class T>
__device__ void copy_rows(T* shared, const T* rows, int64_t stride, int count, int vectors) {
#pragma unroll 2
  for (int i = threadIdx.x; i < count * vectors; i += 32 * kWarps)
    reinterpret_cast<uint4*>(shared)[i] = reinterpret_cast<const uint4*>(rows + i / vectors * stride)[i % vectors];
}

// Applies RMSNorm to the rows in shared memory, rounded as in the forward pass's kernel; warp n normalises row n.
template <class T>
__device__ void norm_rows(const SkinnyLinearArgs<T>& a, T* shared, const T* weight) {
  constexpr int V = kVector<T>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= a.rows) return;
  T* const row = shared + warp * a.in;
  float sum = 0, x[V], w[V];
#pragma unroll 1
  for (int i = lane * V; i < a.in; i += 32 * V) {
    load_vector<V>(x, static_cast<const T*>(row + i));
#pragma unroll
    for (int j = 0; j < V; ++j) sum = fmaf(x[j], x[j], sum);
  }
  const float r = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(a.in) + a.eps);
#pragma unroll 1
  for (int i = lane * V; i < a.in; i += 32 * V) {
    load_vector<V>(x, static_cast<const T*>(row + i));
    load_vector<V>(w, weight + i);
#pragma unroll
    for (int j = 0; j < V; ++j) x[j] = x[j] * r * w[j];
    store_vector<V>(row + i, x);
  }
}

// sum[c][n] = dot(row c of w, row n of x). `held` contains the first vectors of w's rows.
template <class T, int kColumns, int kPieces, int kRows>
__device__ void dot_rows(float (&sum)[kColumns][kRows], const T* w, int64_t w_stride, int columns,
                         HeldVectors<kColumns, kPieces>& held, const T* x, int in, int lane) {
  constexpr int V = kVector<T>;
  const int vectors = in / V;
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
#pragma unroll
    for (int n = 0; n < kRows; ++n) sum[c][n] = 0;
#pragma unroll 1
  for (int from = lane; from < vectors; from += 32 * kPieces) {
    if (from > lane) held.load(w, w_stride, columns, from, vectors);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (from + 32 * i >= vectors) break;
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        float xv[V];
        load_vector<V>(xv, x + n * in + (from + 32 * i) * V);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          float wv[V];
          as_floats<T>(wv, held.v[c][i]);
#pragma unroll
          for (int j = 0; j < V; ++j) sum[c][n] = fmaf(wv[j], xv[j], sum[c][n]);
        }
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
#pragma unroll
    for (int n = 0; n < kRows; ++n) sum[c][n] = warp_sum(sum[c][n]);
}

template <class T, int kRows, int kColumns, int kPieces, Activation kActivation>
__global__ void __launch_bounds__(32 * kWarps, 2) skinny_linear_kernel(SkinnyLinearArgs<T> a) {
  T* const x = reinterpret_cast<T*>(dynamic_shared());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = a.in / kVector<T>;
  const int begin = (static_cast<int>(blockIdx.x) * kWarps + warp) * kColumns;
  const int stride = static_cast<int>(gridDim.x) * kWarps * kColumns;
  HeldVectors<kColumns, kPieces> held;
  const auto load = [&](int row, int rows) { held.load(a.w + row * a.w_stride, a.w_stride, rows, lane, vectors); };
  if (begin < a.out) load(begin, a.out - begin);
  T* const norm = x + kRows * a.in;
  if (a.norm != nullptr) copy_rows(norm, a.norm, 0, 1, vectors);
  pdl_wait();     // w and norm are weights; the previous kernel wrote x and the addend
  pdl_trigger();  // comes late, since the next kernel's weight loads would delay this kernel's
  copy_rows(x, a.x, a.x_stride, a.rows, vectors);
  __syncthreads();
  if (a.norm != nullptr) {
    norm_rows(a, x, norm);
    __syncthreads();
  }
#pragma unroll 1
  for (int column = begin; column < a.out; column += stride) {
    if (column > begin) load(column, a.out - column);
    const int columns = min(kColumns, a.out - column);
    const auto dot = [&](float(&sum)[kColumns][kRows], int row) {
      dot_rows(sum, a.w + row * a.w_stride, a.w_stride, columns, held, x, a.in, lane);
    };
    float sum[kColumns][kRows];
    dot(sum, column);
    if constexpr (kActivation == Activation::silu) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int n = 0; n < kRows; ++n) sum[c][n] = silu_of_rounded<T>(sum[c][n]);
    }
    if constexpr (kActivation == Activation::swiglu) {
      float up[kColumns][kRows];
      load(a.out + column, columns);
      dot(up, a.out + column);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int n = 0; n < kRows; ++n) sum[c][n] = silu_of_rounded<T>(sum[c][n]) * to_float(from_float<T>(up[c][n]));
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (lane != n * kColumns + c || n >= a.rows || c >= columns) continue;
        if (a.addend != nullptr) sum[c][n] += to_float(a.addend[n * a.addend_stride + column + c]);
        a.y[n * a.y_stride + column + c] = from_float<T>(sum[c][n]);
      }
  }
}

template <class T, int kRows, int kColumns, int kPieces, Activation kActivation>
void launch_skinny(Context& ctx, const SkinnyLinearArgs<T>& a) {
  constexpr int64_t kCtasPerSm = kRows == 1 ? 2 : 6;  // CTAs per SM, at most; for one row, CTAs are persistent
  const int64_t ctas = std::min<int64_t>(ceil_div(a.out, kWarps * kColumns), ctx.num_sms * kCtasPerSm);
  launch_pdl(ctx, "skinny_linear", skinny_linear_kernel<T, kRows, kColumns, kPieces, kActivation>,
             dim3(static_cast<unsigned>(ctas)), dim3(32 * kWarps),
             static_cast<size_t>((kRows + (a.norm != nullptr ? 1 : 0)) * a.in) * sizeof(T), a);
}

template <class T, Activation kActivation>
void dispatch_rows(Context& ctx, const SkinnyLinearArgs<T>& a) {
  const bool short_rows = a.in <= 3 * 32 * kVector<T>, by_fours = a.out >= 4 * kWarps * kEnoughCtas;
  if (a.rows == 1 && short_rows && by_fours) return launch_skinny<T, 1, 4, 3, kActivation>(ctx, a);
  if (a.rows == 1) return launch_skinny<T, 1, 1, 12, kActivation>(ctx, a);
  if constexpr (std::is_same_v<T, bf16>) {
    launch_skinny_mma(ctx, a, kActivation);
  } else {
    if (a.rows <= 2) return launch_skinny<T, 2, 1, 12, kActivation>(ctx, a);
    if (a.rows <= 4) return launch_skinny<T, 4, 1, 12, kActivation>(ctx, a);
    launch_skinny<T, 8, 1, 4, kActivation>(ctx, a);
  }
}

// Whether the rows of y or of an addend, of bf16, are whole, aligned 8-byte vectors. True for no addend.
bool has_half_vectors(const ConstTensor& t) {
  constexpr int64_t kElements = 4;
  if (t.empty()) return true;
  return reinterpret_cast<uintptr_t>(t.data) % 8 == 0 && t.size(1) % kElements == 0 &&
         (t.size(0) == 1 || t.stride[0] % kElements == 0);
}

// Returns body(the call's arguments).
template <class Body>
bool with_args(const Tensor& y, const ConstTensor& x, const ConstTensor& w, const SkinnyLinearOptions& o, Body&& body) {
  bool launched = false;
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    launched = body(SkinnyLinearArgs<T>{.y = y.ptr<T>(),
                                        .x = x.ptr<T>(),
                                        .w = w.ptr<T>(),
                                        .norm = o.norm.empty() ? nullptr : o.norm.ptr<T>(),
                                        .addend = o.addend.empty() ? nullptr : o.addend.ptr<T>(),
                                        .y_stride = y.stride[0],
                                        .x_stride = x.stride[0],
                                        .w_stride = w.stride[0],
                                        .addend_stride = o.addend.empty() ? 0 : o.addend.stride[0],
                                        .rows = static_cast<int>(x.size(0)),
                                        .in = static_cast<int>(x.size(1)),
                                        .out = static_cast<int>(y.size(1)),
                                        .eps = static_cast<float>(o.eps)});
  });
  return launched;
}

}  // namespace

bool skinny_linear(Context& ctx, Tensor y, ConstTensor x, ConstTensor w, const SkinnyLinearOptions& o) {
  constexpr int64_t kMostShared = 96 * 1024;  // bytes per CTA: every card allows 99 KiB, and a Hopper SM holds two CTAs
  const int64_t rows = x.size(0), in = x.size(1), padded = rows == 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8;
  const int V = static_cast<int>(16 / size_of(x.dtype));
  const bool many = rows > kFewRows;
  const bool on_tensor_cores = x.dtype == DType::bf16 && rows > 1;  // the MMA kernel keeps x in registers
  const int64_t shared_rows = (on_tensor_cores ? 0 : padded) + (o.norm.empty() ? 0 : 1);
  const int64_t shared = shared_rows * in * size_of(x.dtype) + (on_tensor_cores ? kMmaShared : 0);
  if (many ? !on_tensor_cores : shared > kMostShared) return false;
  if (!has_vectors(x, V) || !has_vectors(w, V) || (!o.norm.empty() && !has_vectors(o.norm, V))) return false;
  return with_args(y, x, w, o, [&]<class T>(const SkinnyLinearArgs<T>& a) {
    if constexpr (std::is_same_v<T, bf16>)
      if (many)
        return launch_skinny_tiles(ctx, a, o.activation) ||
               launch_skinny_many(ctx, a, o.activation, has_half_vectors(y) && has_half_vectors(o.addend));
    switch (o.activation) {
      case Activation::none:
        dispatch_rows<T, Activation::none>(ctx, a);
        break;
      case Activation::silu:
        dispatch_rows<T, Activation::silu>(ctx, a);
        break;
      case Activation::swiglu:
        dispatch_rows<T, Activation::swiglu>(ctx, a);
        break;
    }
    return true;
  });
}

}  // namespace triad::cuda
