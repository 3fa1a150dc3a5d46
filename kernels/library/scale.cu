// scale on the GPU, bound by memory bandwidth: a thread converts one 8-element vector (in f32 two 16-byte vectors), or,
// where a row is not aligned to 16 bytes, one element.
#include "kernels/library/scale.h"

#include "kernels/common/bthd.cuh"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

// vectors: V-element vectors per row; heads: rows per token; tokens: per sequence; count: vectors in all rows.
template <class To, class From, int V>
__global__ void __launch_bounds__(kThreads) scale_kernel(Bthd<To> y, Bthd<const From> x, float factor, bool add,
                                                         int64_t tokens, int heads, int vectors, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int row_vectors = heads * vectors;
  const int64_t token = i / row_vectors, b = token / tokens, t = token % tokens;
  const int in_row = static_cast<int>(i % row_vectors), h = in_row / vectors, column = in_row % vectors * V;
  float v[V], before[V] = {};
  load_vector<V>(v, x.row(b, t, h) + column);
  if (add) load_vector<V>(before, y.row(b, t, h) + column);
#pragma unroll
  for (int j = 0; j < V; ++j) v[j] = add ? fmaf(factor, v[j], before[j]) : factor * v[j];
  store_vector<V>(y.row(b, t, h) + column, v);
}

}  // namespace

void scale(Context& ctx, Tensor y, ConstTensor x, double factor, bool add) {
  constexpr int V = kVector<__nv_bfloat16>;
  const bool vectors = has_vectors(x, V) && has_vectors(y, V);
  dispatch_gpu_float(x.dtype, [&]<class From>() {
    dispatch_gpu_float(y.dtype, [&]<class To>() {
      const auto run = [&]<int kElements>() {
        const int64_t count = x.numel() / kElements;
        launch(ctx, "scale", scale_kernel<To, From, kElements>, dim3(ceil_div(count, kThreads)), kThreads, 0,
               bthd<To>(y), bthd<From>(x), static_cast<float>(factor), add, x.size(1), static_cast<int>(x.size(2)),
               static_cast<int>(x.size(3)) / kElements, count);
      };
      vectors ? run.template operator()<V>() : run.template operator()<1>();
    });
  });
}

}  // namespace triad::cuda
