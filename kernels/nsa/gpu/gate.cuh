// Shared by the gate's kernels (nsa/gpu/gate.cu: any shape; nsa/gpu/gate_mma.cuh: tensor cores): views of planes, the
// weights, the rows, and the layout of gradients in a slice of scratch.
#pragma once
#include "kernels/common/bthd.cuh"
#include "kernels/nsa/gate.h"

namespace triad::cuda {

// A [P,B,T,H] tensor whose last axis is contiguous.
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

template <class T>
struct GateMlp {
  const T *fc1_w, *fc1_b, *fc2_w, *fc2_b;
  int64_t fc1_stride, fc2_stride;
  int width, hidden;  // dk, dk/2
  __host__ __device__ int padded_width() const { return (width + 3) / 4 * 4; }
  __host__ __device__ int padded_hidden() const { return (hidden + 3) / 4 * 4; }
  __host__ __device__ int fc1_row() const { return padded_width() + 1; }
  // The number of floats of the weights in shared memory, a multiple of 4.
  __host__ __device__ int weight_floats() const { return (hidden * (fc1_row() + 4) + 3 + 3) / 4 * 4; }
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

// The rows (b, t, g), numbered in this order.
struct GateRows {
  int64_t count, T;
  int groups, heads;  // heads: per group
  struct Row {
    int64_t b, t;
    int g;
  };
  __device__ Row at(int64_t r) const {
    const int64_t token = r / groups;
    return {token / T, token % T, static_cast<int>(r % groups)};
  }
};

// The offsets of the gradients in a CTA's slice: fc1_w [padded hidden][padded width], fc1_b, fc2_w, fc2_b.
struct GateSlice {
  int fc1_b, fc2_w, fc2_b, size;
  template <class T>
  __host__ __device__ explicit GateSlice(const GateMlp<T>& mlp)
      : fc1_b(mlp.padded_hidden() * mlp.padded_width()),
        fc2_w(fc1_b + mlp.hidden),
        fc2_b(fc2_w + 3 * mlp.hidden),
        size((fc2_b + 3 + 3) / 4 * 4) {}  // slices are 16-byte aligned
};

// The gradient dz of fc2's output, from the gates g and their gradient dg.
__device__ __forceinline__ void gate_dz(float* dz, const float (&g)[3], const float (&dg)[3], bool softmax,
                                        float inverse_temperature) {
  const float mean = g[0] * dg[0] + g[1] * dg[1] + g[2] * dg[2];
#pragma unroll
  for (int b = 0; b < 3; ++b) dz[b] = g[b] * (softmax ? dg[b] - mean : dg[b] * (1.0f - g[b])) * inverse_temperature;
}
// The same for row `row`; past the last row dz is 0, and so is every gradient computed from it.
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
