// Call arguments and SiLU, for both skinny linear kernels.
#pragma once
#include "kernels/common/bthd.cuh"
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

// Launches the tensor-core kernel for 2 to 8 rows in bf16 (decode/skinny_linear_mma.cu). kMmaShared: the most shared
// memory, in bytes, that it needs on top of the norm's weights.
inline constexpr int64_t kMmaShared = 9 * 1024;
void launch_skinny_mma(Context&, const SkinnyLinearArgs<__nv_bfloat16>&, SkinnyLinearOptions::Activation);

}  // namespace triad::cuda
