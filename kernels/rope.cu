// Rotary position embedding on the GPU. Bound by memory: 4 bytes an element in bf16 (6 where the gradient comes in
// f32). A thread rotates one vector of the first half of a head with its partner in the second half, so it may work in
// place. A CTA takes whole tokens, about 512 such pairs; all heads of a token use the same angles, which after the
// first head come from L1.
#include <algorithm>

#include "kernels/bthd.cuh"
#include "kernels/rope.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kPairsPerCta = 512;

// Whether the V-element vectors of both halves are aligned.
bool has_vector_pairs(const ConstTensor& t, int V) { return has_vectors(t, V) && t.size(-1) % (2 * V) == 0; }

struct Geometry {
  uint32_t rows, T, H, half;  // rows: B * T
  uint32_t rows_per_cta;
};

template <class Out, class In, int V>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(Bthd<Out> y, Bthd<const In> x, const float* __restrict__ cos_table, int64_t cos_stride,
                const float* __restrict__ sin_table, int64_t sin_stride, Geometry g, float direction) {
  const uint32_t vectors = g.half / V, pairs_per_row = g.H * vectors;
  const uint32_t first_row = blockIdx.x * g.rows_per_cta, rows = min(g.rows_per_cta, g.rows - first_row);
  for (uint32_t i = threadIdx.x; i < rows * pairs_per_row; i += kThreads) {
    const uint32_t row = first_row + i / pairs_per_row, pair = i % pairs_per_row;
    const uint32_t b = row / g.T, t = row % g.T, h = pair / vectors, j = pair % vectors * V;
    const In* from = x.row(b, t, h) + j;
    float first[V], second[V], cos[V], sin[V];
    load_vector<V>(first, from);
    load_vector<V>(second, from + g.half);
    load_vector<V>(cos, cos_table + t * cos_stride + j);
    load_vector<V>(sin, sin_table + t * sin_stride + j);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float a = first[k], c = second[k], s = direction * sin[k];
      first[k] = a * cos[k] - c * s;
      second[k] = c * cos[k] + a * s;
    }
    Out* to = y.row(b, t, h) + j;
    store_vector<V>(to, first);
    store_vector<V>(to + g.half, second);
  }
}

template <class Out, class In>
void rotate(Context& ctx, Tensor y, ConstTensor x, ConstTensor cos, ConstTensor sin, int direction) {
  constexpr int kV = kVector<Out>;
  const bool vectors = has_vector_pairs(y, kV) && has_vector_pairs(x, kV) && all_have_vectors(kV, cos, sin);
  dispatch_vector<Out>(vectors, [&]<int V>() {
    Geometry g{static_cast<uint32_t>(x.size(0) * x.size(1)), static_cast<uint32_t>(x.size(1)),
               static_cast<uint32_t>(x.size(2)), static_cast<uint32_t>(x.size(3) / 2), 0};
    g.rows_per_cta = std::max(1u, kPairsPerCta / std::max(1u, g.H * g.half / V));
    launch(ctx, direction > 0 ? "rope forward" : "rope backward", rope_kernel<Out, In, V>,
           dim3(ceil_div(g.rows, g.rows_per_cta)), dim3(kThreads), 0, bthd<Out>(y), bthd<In>(x), cos.ptr<float>(),
           cos.stride[0], sin.ptr<float>(), sin.stride[0], g, direction);
  });
}

}  // namespace

void rope(Context& ctx, Tensor y, ConstTensor x, ConstTensor cos, ConstTensor sin, int direction) {
  dispatch_gpu_float(y.dtype, [&]<class T>() {
    if (x.dtype == y.dtype)
      rotate<T, T>(ctx, y, x, cos, sin, direction);
    else
      rotate<T, float>(ctx, y, x, cos, sin, direction);
  });
}

}  // namespace triad::cuda
