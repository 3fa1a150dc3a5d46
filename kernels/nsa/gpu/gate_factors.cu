// Gates given as factors on the GPU. All kernels are bound by memory bandwidth. One thread per row (b, t, h) of the
// factors; in nsa_gate_dout, one thread per dout vector, which it reads once for the three branches.
#include "kernels/nsa/gate_factors.h"

#include "kernels/common/bthd.cuh"
#include "kernels/nsa/gpu/gate_factors.cuh"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads)
    gate_factors_forward_kernel(float* __restrict__ gate, Factors<const T> factors, int64_t rows) {
  factors.write_planes(gate, int64_t{blockIdx.x} * kThreads + threadIdx.x, rows);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gate_factors_backward_kernel(Factors<T> dfactors, const float* __restrict__ dgate, int64_t rows) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows) return;
#pragma unroll
  for (int k = 0; k < 3; ++k) dfactors.at(i, k) = from_float<T>(dgate[k * rows + i]);
}

template <class T>
struct GatedBranches {
  Bthd<T> to[3];  // data == nullptr: not wanted
};

// heads: Hq; group: query heads per gate; vectors: V-element vectors per row; count: vectors in dout.
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    gate_dout_kernel(GatedBranches<T> gated, Bthd<const T> dout, const float* __restrict__ gate, int64_t all_tokens,
                     int64_t tokens, int heads, int group, int vectors, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int row_vectors = heads * vectors, gates = heads / group;
  const int64_t token = i / row_vectors, b = token / tokens, t = token % tokens;
  const int in_row = static_cast<int>(i % row_vectors), h = in_row / vectors, column = in_row % vectors * V;
  float x[V], y[V];
  load_vector<V>(x, dout.row(b, t, h) + column);
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    if (gated.to[k].data == nullptr) continue;
    const float g = gate[(k * all_tokens + token) * gates + h / group];
#pragma unroll
    for (int j = 0; j < V; ++j) y[j] = g * x[j];
    store_vector<V>(gated.to[k].row(b, t, h) + column, y);
  }
}

// bounds[i] = slack * the largest |gate| among `share` neighbouring gates; both are contiguous.
__global__ void __launch_bounds__(kThreads)
    gate_bounds_kernel(float* __restrict__ bounds, const float* __restrict__ gate, int share, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  float most = 0;
  for (int h = 0; h < share; ++h) most = fmaxf(most, fabsf(gate[i * share + h]));
  bounds[i] = most * static_cast<float>(kGateBoundSlack);
}

}  // namespace

void nsa_gate_factors_forward(Context& ctx, Tensor gate, ConstTensor factors) {
  const int64_t rows = gate.numel() / 3;
  dispatch_gpu_float(factors.empty() ? DType::f32 : factors.dtype, [&]<class T>() {
    launch(ctx, "gate_factors_forward", gate_factors_forward_kernel<T>, dim3(ceil_div(rows, kThreads)), kThreads, 0,
           gate.ptr<float>(), factors_of<const T>(factors, gate), rows);
  });
}

void nsa_gate_factors_backward(Context& ctx, Tensor dfactors, ConstTensor dgate) {
  const int64_t rows = dgate.numel() / 3;
  dispatch_gpu_float(dfactors.dtype, [&]<class T>() {
    launch(ctx, "gate_factors_backward", gate_factors_backward_kernel<T>, dim3(ceil_div(rows, kThreads)), kThreads, 0,
           factors_of<T>(dfactors, dgate), dgate.ptr<float>(), rows);
  });
}

void nsa_gate_dout(Context& ctx, const std::array<Tensor, 3>& gated, Tensor bounds, ConstTensor dout,
                   ConstTensor gate) {
  const int64_t heads = dout.size(2), all_tokens = dout.size(0) * dout.size(1);
  dispatch_gpu_float(dout.dtype, [&]<class T>() {
    GatedBranches<T> to{};
    bool vectors = has_vectors(dout, kVector<T>);
    for (int k = 0; k < 3; ++k) {
      if (gated[k].empty()) continue;
      to.to[k] = bthd<T>(gated[k]);
      vectors = vectors && has_vectors(gated[k], kVector<T>);
    }
    dispatch_vector<T>(vectors, [&]<int V>() {
      const int64_t count = dout.numel() / V;
      launch(ctx, "gate_dout", gate_dout_kernel<T, V>, dim3(ceil_div(count, kThreads)), kThreads, 0, to, bthd<T>(dout),
             gate.ptr<float>(), all_tokens, dout.size(1), static_cast<int>(heads),
             static_cast<int>(heads / gate.size(3)), static_cast<int>(dout.size(3)) / V, count);
    });
  });
  if (bounds.empty()) return;
  launch(ctx, "gate_bounds", gate_bounds_kernel, dim3(ceil_div(bounds.numel(), kThreads)), kThreads, 0,
         bounds.ptr<float>(), gate.ptr<float>(), static_cast<int>(gate.size(3) / bounds.size(3)), bounds.numel());
}

}  // namespace triad::cuda
