// NSA's compression phi on the GPU: kernels for the mean and the convolution, and the MLP's gather and scatter. All are
// bound by memory bandwidth: a thread computes one output row vector (16 bytes if alignment allows) from the rows that
// contribute to it.
//   forward: y[c] is computed from block c's l rows. Blocks overlap, so a row is read l/d times, mostly from L1 and L2.
//   backward: dx[t] sums over the blocks that contain token t, at most ceil(l/d). Each element is written once, without
//             atomics.
//   weights: dw and dpos are sums over all blocks. Each slice of the blocks stores partial sums to scratch, and
//            partials.cuh adds them in order. The slice count doesn't depend on the card, so all cards add in the same
//            order.
#include "kernels/common/bthd.cuh"
#include "kernels/common/documents.cuh"
#include "kernels/common/partials.cuh"
#include "kernels/nsa/gate_factors.h"
#include "kernels/nsa/gpu/gate_factors.cuh"

namespace triad::cuda {
namespace {

constexpr int kThreads = 64;         // small CTAs spread few rows over all SMs
constexpr int64_t kMaxSlices = 256;  // the most slices of partial sums for a weight's gradient

struct Geometry {
  int64_t T, Tc, H, D;  // tokens, blocks, heads, width
  int64_t l, d;         // block length and stride, tokens
  DocumentView documents;
  // Block c's first token in sequence b; -1 if no document in a packed row uses the block.
  __device__ int64_t begin(int64_t b, int64_t c) const {
    return documents.row(static_cast<int>(b)).key_begin(static_cast<int>(c), static_cast<int>(l), static_cast<int>(d));
  }
};

// Where the V-element vector that a thread computes is, in a tensor [B,rows,heads,width].
struct VectorIndex {
  int64_t b, row, h, column;
  __device__ VectorIndex(uint32_t index, int64_t rows, int64_t heads, int64_t width, int V) {
    const auto take = [&](int64_t size) {  // 32-bit: 64-bit divisions would dominate the kernel
      const uint32_t n = static_cast<uint32_t>(size), remainder = index % n;
      index /= n;
      return remainder;
    };
    column = int64_t{take(width / V)} * V;
    h = take(heads);
    row = take(rows);
    b = index;
  }
};
__device__ int64_t thread_index() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

// Computes vector `index` of y: forward for conv, y_c = sum_i w[i] x[c*d + i], and avg (w = nullptr), the mean. count:
// vectors in y. Writes 0 for a block that no document uses.
template <class T, int V>
__device__ __forceinline__ void compress_vector(const Bthd<T>& y, const Bthd<const T>& x, const T* __restrict__ w,
                                                int64_t w_stride, const Geometry& g, int64_t index, int64_t count) {
  if (index >= count) return;
  const VectorIndex at(index, g.Tc, g.H, g.D, V);
  const int64_t begin = g.begin(at.b, at.row);
  const T* p = x.row(at.b, begin, at.h) + at.column;
  float sum[V] = {};
#pragma unroll 16
  for (int64_t i = 0; i < (begin < 0 ? 0 : g.l); ++i) {
    float row[V];
    load_vector<V>(row, p + i * x.stride_t);
    if (w != nullptr) {
      float weight[V];
      load_vector<V>(weight, w + i * w_stride + at.column);
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] = fmaf(weight[j], row[j], sum[j]);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += row[j];
    }
  }
  if (w == nullptr) {
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] /= static_cast<float>(g.l);
  }
  store_vector<V>(y.row(at.b, at.row, at.h) + at.column, sum);
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    compress_kernel(Bthd<T> y, Bthd<const T> x, const T* __restrict__ w, int64_t w_stride, Geometry g, int64_t count) {
  compress_vector<T, V>(y, x, w, w_stride, g, thread_index(), count);
}

// One tensor's averages, how many vectors they have, and how many CTAs compute them.
template <class T>
struct Averages {
  Bthd<T> y;
  Bthd<const T> x;
  Geometry g;
  int64_t count;
  unsigned ctas;
};
// The first CTAs compute the first tensor's averages, the next ones the second's, the last ones the gate planes.
template <class T, int V, class Factor>
__global__ void __launch_bounds__(kThreads)
    averages_and_gates_kernel(Averages<T> first, Averages<T> second, float* __restrict__ gate,
                              Factors<const Factor> factors, int64_t gate_rows) {
  const unsigned cta = blockIdx.x, both = first.ctas + second.ctas;
  if (cta >= both) return factors.write_planes(gate, int64_t{cta - both} * kThreads + threadIdx.x, gate_rows);
  const bool is_first = cta < first.ctas;
  const Averages<T> a = is_first ? first : second;
  const int64_t index = int64_t{is_first ? cta : cta - first.ctas} * kThreads + threadIdx.x;
  compress_vector<T, V>(a.y, a.x, nullptr, 0, a.g, index, a.count);
}

// AvgTerm, ConvTerm, RowTerm: the gradient that block c passes to its i-th token, one struct for each kind of phi.
// add() adds this gradient's vector at `column` to sum.
struct AvgTerm {
  Bthd<const float> dy;
  float inverse_l;
  template <int V>
  __device__ void add(float (&sum)[V], int64_t b, int64_t c, int64_t h, int64_t /*i*/, int64_t column) const {
    float dy_c[V];
    load_vector<V>(dy_c, dy.row(b, c, h) + column);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = fmaf(dy_c[j], inverse_l, sum[j]);
  }
};
template <class T>
struct ConvTerm {
  Bthd<const float> dy;
  const T* w;
  int64_t w_stride;
  template <int V>
  __device__ void add(float (&sum)[V], int64_t b, int64_t c, int64_t h, int64_t i, int64_t column) const {
    float dy_c[V], weight[V];
    load_vector<V>(dy_c, dy.row(b, c, h) + column);
    load_vector<V>(weight, w + i * w_stride + column);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = fmaf(dy_c[j], weight[j], sum[j]);
  }
};
// phi mlp: its input is the block's l tokens, concatenated, and its gradient is drows' row (b, c, h). The row's column
// i * D + j belongs to the block's token i, column j.
template <class T>
struct RowTerm {
  const T* drows;
  int64_t row_stride;
  int64_t Tc, H, D;
  template <int V>
  __device__ void add(float (&sum)[V], int64_t b, int64_t c, int64_t h, int64_t i, int64_t column) const {
    float row[V];
    load_vector<V>(row, drows + ((b * Tc + c) * H + h) * row_stride + i * D + column);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += row[j];
  }
};

// dx[t] = term.add summed over the blocks c that contain token t, c*d <= t < c*d + l, in ascending order.
template <class T, int V, class Term>
__global__ void __launch_bounds__(kThreads) compress_dx_kernel(Bthd<T> dx, Term term, Geometry g, int64_t count) {
  if (thread_index() >= count) return;
  const VectorIndex at(thread_index(), g.T, g.H, g.D, V);
  const DocumentRow<int> row = g.documents.row(static_cast<int>(at.b));
  const int token = static_cast<int>(at.row), l = static_cast<int>(g.l), d = static_cast<int>(g.d);
  // t: the position in the document, which may have begun before the first token that x holds
  const int t = token - row.begin(token), first_key = floor_div(row.begin(token), d);
  const int first = max(blocks_within(t, l, d), -first_key),
            last = min(t / d + 1, row.visible_keys(row.end(token) - 1, l, d));
  float sum[V] = {};
  for (int c = first; c < last; ++c) term.template add<V>(sum, at.b, first_key + c, at.h, t - c * d, at.column);
  store_vector<V>(dx.row(at.b, token, at.h) + at.column, sum);
}

// Partial sums for the gradient of conv's weight w [l,D]. A slice s is rows_per_slice consecutive rows (b, c, h) of dy:
//   slices[s][i][j] = sum over its rows: x[b, c*d + i, h, j] * dy[b, c, h, j]
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    conv_dw_kernel(float* __restrict__ slices, Bthd<const T> x, Bthd<const float> dy, Geometry g, int64_t rows,
                   int64_t rows_per_slice) {
  const int64_t vectors = g.D / V, index = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (index >= g.l * vectors) return;
  const int64_t i = index / vectors, column = index % vectors * V;
  const int64_t begin = blockIdx.x * rows_per_slice, end = min(begin + rows_per_slice, rows);
  int64_t h = begin % g.H, c = begin / g.H % g.Tc, b = begin / g.H / g.Tc;
  float sum[V] = {};
  for (int64_t r = begin; r < end; ++r) {
    if (const int64_t token = g.begin(b, c); token >= 0) {
      float row[V], dy_c[V];
      load_vector<V>(row, x.row(b, token + i, h) + column);
      load_vector<V>(dy_c, dy.row(b, c, h) + column);
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] = fmaf(row[j], dy_c[j], sum[j]);
    }
    if (++h == g.H) {
      h = 0;
      if (++c == g.Tc) c = 0, ++b;
    }
  }
  store_vector<V>(slices + (blockIdx.x * g.l + i) * g.D + column, sum);
}

// Partial sums for the gradient of pos [l,D]: slices[s][column] = drows[row][column], summed over slice s's
// rows_per_slice rows (b, c, h). Blocks that no document uses are left out.
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    compress_dpos_kernel(float* __restrict__ slices, const T* __restrict__ drows, int64_t row_stride, int64_t columns,
                         Geometry g, int64_t rows, int64_t rows_per_slice) {
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * V;
  if (column >= columns) return;
  const int64_t begin = blockIdx.x * rows_per_slice, end = min(begin + rows_per_slice, rows);
  float sum[V] = {};
#pragma unroll 4
  for (int64_t r = begin; r < end; ++r) {
    if (g.documents.begins != nullptr && g.begin(r / g.H / g.Tc, r / g.H % g.Tc) < 0) continue;
    float row[V];
    load_vector<V>(row, drows + r * row_stride + column);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += row[j];
  }
  store_vector<V>(slices + blockIdx.x * columns + column, sum);
}

// The MLP's input rows: rows[(b,c,h)][i*D + j] = x[b, c*d + i, h, j] + pos[i][j]; 0 for a block that no document uses.
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    compress_gather_kernel(T* __restrict__ rows, int64_t row_stride, Bthd<const T> x, const T* __restrict__ pos,
                           int64_t pos_stride, Geometry g, int64_t count) {
  if (thread_index() >= count) return;
  const int64_t vectors = g.D / V, column = thread_index() % vectors * V;
  const int64_t i = thread_index() / vectors % g.l, row = thread_index() / vectors / g.l;
  const int64_t h = row % g.H, c = row / g.H % g.Tc, b = row / g.H / g.Tc;
  float value[V] = {}, shift[V];
  if (const int64_t begin = g.begin(b, c); begin >= 0) {
    load_vector<V>(value, x.row(b, begin + i, h) + column);
    load_vector<V>(shift, pos + i * pos_stride + column);
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] += shift[j];
  }
  store_vector<V>(rows + row * row_stride + i * g.D + column, value);
}

Geometry geometry(const ConstTensor& x, const PhiOptions& o, const Documents& documents) {
  return {x.size(1), compressed_length(x.size(1), o.l, o.d), x.size(2), x.size(3), o.l,
          o.d,       document_view(documents, x.size(1))};
}
dim3 grid_for(int64_t threads) {
  TRIAD_CHECK(threads < int64_t{1} << 31, "nsa_compress: {} vectors do not fit 31 bits", threads);
  return dim3(static_cast<unsigned>(ceil_div(threads, kThreads)));
}

// Splits `rows` rows into at most kMaxSlices slices, per_slice rows each; the last slice may be shorter.
struct Slices {
  int64_t per_slice, count;
  explicit Slices(int64_t rows) : per_slice(ceil_div(rows, kMaxSlices)), count(ceil_div(rows, per_slice)) {}
};

template <class T, int V, class Term>
void launch_dx(Context& ctx, const Tensor& dx, const Term& term, const Geometry& g) {
  const int64_t count = dx.numel() / V;
  launch(ctx, "compress_dx", compress_dx_kernel<T, V, Term>, grid_for(count), kThreads, 0, bthd<T>(dx), term, g, count);
}

}  // namespace

void compress_linear_forward(Context& ctx, Tensor y, ConstTensor x, const PhiWeights& weights, const PhiOptions& o,
                             const Documents& documents) {
  const Geometry g = geometry(x, o, documents);
  const bool conv = o.kind == Phi::conv;
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    const bool vectors = all_have_vectors(kVector<T>, y, x) && (!conv || has_vectors(weights.w, kVector<T>));
    dispatch_vector<T>(vectors, [&]<int V>() {
      const int64_t count = y.numel() / V;
      launch(ctx, "compress", compress_kernel<T, V>, grid_for(count), kThreads, 0, bthd<T>(y), bthd<T>(x),
             conv ? weights.w.ptr<T>() : nullptr, weights.w.stride[0], g, count);
    });
  });
}

bool averages_and_gates(Context& ctx, const std::array<Tensor, 2>& y, const std::array<ConstTensor, 2>& x,
                        const CompressionBlocks& blocks, const Tensor& gate, const ConstTensor& factors,
                        const Documents& documents) {
  const PhiOptions avg{blocks, Phi::avg};
  const DType factor = factors.empty() ? DType::f32 : factors.dtype;
  const int64_t rows = gate.numel() / 3;
  bool fits = false;
  dispatch_gpu_float(x[0].dtype, [&]<class T>() {
    const bool vectors = all_have_vectors(kVector<T>, y[0], x[0]);
    fits = vectors == all_have_vectors(kVector<T>, y[1], x[1]) && rows < int64_t{1} << 31;
    if (!fits) return;
    dispatch_vector<T>(vectors, [&]<int V>() {
      const auto of = [&](int i) {
        const int64_t count = y[i].numel() / V;
        return Averages<T>{bthd<T>(y[i]), bthd<T>(x[i]), geometry(x[i], avg, documents), count, grid_for(count).x};
      };
      const Averages<T> first = of(0), second = of(1);
      const dim3 grid(first.ctas + second.ctas + grid_for(rows).x);
      dispatch_gpu_float(factor, [&]<class F>() {
        launch(ctx, "averages_and_gates", averages_and_gates_kernel<T, V, F>, grid, kThreads, 0, first, second,
               gate.ptr<float>(), factors_of<const F>(factors, gate), rows);
      });
    });
  });
  return fits;
}

void compress_linear_backward(Context& ctx, Tensor dx, const PhiGrads& grads, ConstTensor dy, ConstTensor x,
                              const PhiWeights& weights, const PhiOptions& o, const Documents& documents) {
  const Geometry g = geometry(x, o, documents);
  const bool conv = o.kind == Phi::conv;
  const int64_t rows = dy.size(0) * dy.size(1) * dy.size(2);
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    const bool vectors = all_have_vectors(kVector<T>, dx, dy, x) && (!conv || has_vectors(weights.w, kVector<T>));
    dispatch_vector<T>(vectors, [&]<int V>() {
      if (!conv) return launch_dx<T, V>(ctx, dx, AvgTerm{bthd<float>(dy), 1.0f / static_cast<float>(o.l)}, g);
      launch_dx<T, V>(ctx, dx, ConvTerm<T>{bthd<float>(dy), weights.w.ptr<T>(), weights.w.stride[0]}, g);
      if (rows == 0) return;
      const Slices split(rows);
      Scratch::Scope scope(ctx.scratch);
      const Tensor slices = scope.alloc(DType::f32, {split.count, g.l * g.D});
      launch(ctx, "conv_dw", conv_dw_kernel<T, V>, dim3(split.count, ceil_div(g.l * g.D / V, kThreads)), kThreads, 0,
             slices.ptr<float>(), bthd<T>(x), bthd<float>(dy), g, rows, split.per_slice);
      add_partials(ctx, slices, {{grads.w, 0, g.D}});
    });
  });
}

void compress_gather(Context& ctx, Tensor rows, ConstTensor x, ConstTensor pos, const PhiOptions& o,
                     const Documents& documents) {
  const Geometry g = geometry(x, o, documents);
  dispatch_gpu_float(x.dtype, [&]<class T>() {
    const bool vectors = all_have_vectors(kVector<T>, rows, x, pos);
    dispatch_vector<T>(vectors, [&]<int V>() {
      const int64_t count = rows.numel() / V;
      launch(ctx, "compress_gather", compress_gather_kernel<T, V>, grid_for(count), kThreads, 0, rows.ptr<T>(),
             rows.stride[0], bthd<T>(x), pos.ptr<T>(), pos.stride[0], g, count);
    });
  });
}

void compress_scatter(Context& ctx, Tensor dx, Tensor dpos, ConstTensor drows, const PhiOptions& o,
                      const Documents& documents) {
  const Geometry g = geometry(dx, o, documents);
  const int64_t rows = drows.size(0), columns = g.l * g.D;
  dispatch_gpu_float(dx.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, dx, drows), [&]<int V>() {
      launch_dx<T, V>(ctx, dx, RowTerm<T>{drows.ptr<T>(), drows.stride[0], g.Tc, g.H, g.D}, g);
      if (rows == 0) return;
      const Slices split(rows);
      Scratch::Scope scope(ctx.scratch);
      const Tensor slices = scope.alloc(DType::f32, {split.count, columns});
      launch(ctx, "compress_dpos", compress_dpos_kernel<T, V>, dim3(split.count, ceil_div(columns / V, kThreads)),
             kThreads, 0, slices.ptr<float>(), drows.ptr<T>(), drows.stride[0], columns, g, rows, split.per_slice);
      add_partials(ctx, slices, {{dpos, 0, g.D}});
    });
  });
}

}  // namespace triad::cuda
