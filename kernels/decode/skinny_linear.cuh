// What the two kernels of a few rows' linear layer share: the view of a call.
#pragma once
#include "kernels/common/bthd.cuh"
#include "kernels/decode/skinny_linear.h"

namespace triad::cuda {

template <class T>
struct Few {
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

// Of rows in bf16, on tensor cores (decode/skinny_linear_mma.cu). Shared memory beside the norm: at most so many bytes.
inline constexpr int64_t kMmaShared = 9 * 1024;
void launch_few_mma(Context&, const Few<__nv_bfloat16>&, SkinnyLinearOptions::Activation);

}  // namespace triad::cuda
