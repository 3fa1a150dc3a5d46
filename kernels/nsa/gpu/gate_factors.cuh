// Device view for gates that a caller gives as factors (nsa/gate_factors.h).
#pragma once
#include <type_traits>

#include "kernels/common/launch.cuh"

namespace triad::cuda {
namespace {

// The caller's gates [B,T,H,3]: the three branches' factors. Strides are in elements and may be any. data == nullptr:
// every factor is 1/3.
template <class T>
struct Factors {
  T* data;
  int64_t stride_b, stride_t, stride_h, stride_k;
  int64_t tokens;  // T
  int heads;
  __device__ T& at(int64_t row, int k) const {
    const int64_t token = row / heads;
    return data[token / tokens * stride_b + token % tokens * stride_t + row % heads * stride_h + k * stride_k];
  }
  // Writes the three gates for row i out of `rows`, one plane per branch.
  __device__ void write_planes(float* gate, int64_t i, int64_t rows) const {
    if (i >= rows) return;
#pragma unroll
    for (int k = 0; k < 3; ++k) gate[k * rows + i] = data == nullptr ? 1.0f / 3.0f : to_float(at(i, k));
  }
};
template <class T, class TensorType>
Factors<T> factors_of(const TensorType& t, const ConstTensor& gate) {
  if (t.empty()) return {nullptr, 0, 0, 0, 0, gate.size(2), static_cast<int>(gate.size(3))};
  return {t.template ptr<std::remove_const_t<T>>(),
          t.stride[0],
          t.stride[1],
          t.stride[2],
          t.stride[3],
          t.size(1),
          static_cast<int>(t.size(2))};
}

}  // namespace
}  // namespace triad::cuda
