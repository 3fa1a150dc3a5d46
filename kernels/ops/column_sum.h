// Sums over a matrix's rows: a bias's gradient, which linear_forward() adds as repeat_row(bias, N).
#pragma once
#include "engine/context.h"

namespace triad {

// y [C] acc added to: y[c] += sum over n of x[n][c]  <-  x [N,C] T, any row stride
void column_sum(Context&, Tensor y, ConstTensor x);

namespace cuda {
void column_sum(Context&, Tensor y, ConstTensor x);
}  // namespace cuda
}  // namespace triad
