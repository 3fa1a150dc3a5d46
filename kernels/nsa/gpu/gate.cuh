// Shared by the gate MLP's kernels (nsa/gpu/gate.cu: any shape; nsa/gpu/gate_mma.cuh: tensor cores): a gate tensor's
// view, the MLP's weights, the row numbering, and how a scratch slice holds the weight gradients.
#pragma once
#include "kernels/common/bthd.cuh"
#include "kernels/nsa/gate.h"

namespace triad::cuda {

// Views a tensor [P,B,T,H] whose last axis is contiguous, such as the gates [3,B,T,Hkv]. Strides in elements.
template <class T>
struct Planes {
  T* data;
  int64_t stride_p, stride_b, stride_t;
  __device__ T& at(int64_t p, int64_t b, int64_t t, int64_t h) const {
    return data[p * stride_p + b * stride_b + t * stride_t + h];
  }
};
template <class T, class TensorType>
Planes<T> planes(const TensorType& t) {
  return {t.template ptr<std::remove_const_t<T>>(), t.stride[0], t.stride[1], t.stride[2]};
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The gate MLP's weights as a kernel argument, and their sizes in shared memory. Padded sizes are multiples of 4. An
// fc1 row is one float longer, an odd length, so that lanes in different rows use different banks.
template <class T>
struct GateMlp {
  const T *fc1_w, *fc1_b, *fc2_w, *fc2_b;
  int64_t fc1_stride, fc2_stride;  // row strides, in elements
  int width, hidden;               // dk; hidden units, dk/2
  __host__ __device__ int padded_width() const { return (width + 3) / 4 * 4; }
  __host__ __device__ int padded_hidden() const { return (hidden + 3) / 4 * 4; }
  __host__ __device__ int fc1_row() const { return padded_width() + 1; }
  // Floats that both layers' weights take in shared memory, a multiple of 4; the same without fc1's matrix.
  __host__ __device__ int weight_floats() const { return (hidden * (fc1_row() + 4) + 3 + 3) / 4 * 4; }
  __host__ __device__ int weight_floats_without_fc1() const { return (hidden * 4 + 3 + 3) / 4 * 4; }
};
template <class T>
GateMlp<T> gate_mlp(const GateWeights& w) {
  return {w.fc1_w.ptr<T>(),
          w.fc1_b.ptr<T>(),
          w.fc2_w.ptr<T>(),
          w.fc2_b.ptr<T>(),
          w.fc1_w.stride[0],
          w.fc2_w.stride[0],
          static_cast<int>(w.fc1_w.size(1)),
          static_cast<int>(w.fc1_w.size(0))};
}

// The gate MLP's rows, one per token and group, numbered r = (b * T + t) * groups + g. at(r) returns (b, t, g).
struct GateRows {
  int64_t count, T;   // row count; tokens per sequence
  int groups, heads;  // groups per token; query heads per group
  struct Row {
    int64_t b, t;
    int g;
  };
  __device__ Row at(int64_t r) const {
    const int64_t token = r / groups;
    return {token / T, token % T, static_cast<int>(r % groups)};
  }
};

// How a scratch slice, one CTA's weight gradient partials, is laid out: fc1_w [padded hidden][padded width], fc1_b,
// fc2_w, fc2_b. Offsets and size in floats.
struct GateSlice {
  int fc1_b, fc2_w, fc2_b, size;
  template <class T>
  __host__ __device__ explicit GateSlice(const GateMlp<T>& mlp)
      : fc1_b(mlp.padded_hidden() * mlp.padded_width()),
        fc2_w(fc1_b + mlp.hidden),
        fc2_b(fc2_w + 3 * mlp.hidden),
        size((fc2_b + 3 + 3) / 4 * 4) {}  // slices are 16-byte aligned
};

// Computes dz, the gradient at fc2's three outputs, from the gates g and their gradient dg.
__device__ __forceinline__ void gate_dz(float* dz, const float (&g)[3], const float (&dg)[3], bool softmax,
                                        float inverse_temperature) {
  const float mean = g[0] * dg[0] + g[1] * dg[1] + g[2] * dg[2];
#pragma unroll
  for (int b = 0; b < 3; ++b) dz[b] = g[b] * (softmax ? dg[b] - mean : dg[b] * (1.0f - g[b])) * inverse_temperature;
}
// The same for row `row`, whose gates and gradient it reads. Past the last row dz is 0, and so is every gradient that
// is computed from it.
__device__ __forceinline__ void gate_dz(float* dz, const Planes<const float>& dgate, const Planes<const float>& gate,
                                        const GateRows& rows, int64_t row, bool softmax, float inverse_temperature) {
  float g[3] = {}, dg[3] = {};
  if (row < rows.count) {
    const GateRows::Row r = rows.at(row);
#pragma unroll
    for (int b = 0; b < 3; ++b) g[b] = gate.at(b, r.b, r.t, r.g), dg[b] = dgate.at(b, r.b, r.t, r.g);
  }
  gate_dz(dz, g, dg, softmax, inverse_temperature);
}

}  // namespace triad::cuda
