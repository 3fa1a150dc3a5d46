// Call arguments, SiLU and RMSNorm, for the skinny linear kernels.
#pragma once
#include "kernels/common/bthd.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/decode/skinny_linear.h"

namespace triad::cuda {

template <class T>
struct SkinnyLinearArgs {
  T* y;
  const T *x, *w, *norm, *addend;
  int64_t y_stride, x_stride, w_stride, addend_stride;
  int rows, in, out;
  float eps;
};

template <class T>
__device__ float silu_of_rounded(float x) {
  x = to_float(from_float<T>(x));
  return x / (1.0f + expf(-x));
}

// ---- for the tensor-core kernels ----

using bf16 = __nv_bfloat16;
inline constexpr int kEight = 8;  // columns, or rows of x, in a quarter of an MMA; elements of a 16-byte vector

__device__ __forceinline__ float sum_of_squares(const uint4& vector, float sum) {
  float x[kEight];
  as_floats<bf16>(x, vector);
#pragma unroll
  for (int j = 0; j < kEight; ++j) sum = fmaf(x[j], x[j], sum);
  return sum;
}
// One vector's RMSNorm, rounded as in the forward pass's kernel. r: 1 / the row's root mean square.
__device__ __forceinline__ uint4 normed(const uint4& vector, const uint4& weight, float r) {
  float x[kEight], w[kEight];
  as_floats<bf16>(x, vector);
  as_floats<bf16>(w, weight);
#pragma unroll
  for (int j = 0; j < kEight; ++j) x[j] = x[j] * r * w[j];
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

// Launches the tensor-core kernel for 2 to kFewRows rows in bf16 (decode/skinny_linear_mma.cu). kMmaShared: the most
// shared memory, in bytes, that it needs on top of the norm's weights.
inline constexpr int64_t kMmaShared = 9 * 1024;
void launch_skinny_mma(Context&, const SkinnyLinearArgs<bf16>&, SkinnyLinearOptions::Activation);
// The same kernel for up to kMostRows rows. Returns false and does nothing if the rows are more, or the layer is too
// large for the card, which the number of rows has no part in.
bool launch_skinny_tiles(Context&, const SkinnyLinearArgs<bf16>&, SkinnyLinearOptions::Activation);
// Launches the kernel for more rows in bf16 on Hopper (decode/skinny_linear_many.cu). Returns false and does nothing if
// the rows of x are too many or too long. vectors: whether y's and the addend's rows are whole, aligned 8-byte vectors.
bool launch_skinny_many(Context&, const SkinnyLinearArgs<bf16>&, SkinnyLinearOptions::Activation, bool vectors);

}  // namespace triad::cuda
