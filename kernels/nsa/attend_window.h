// NSA's window branch, attention over a sliding window: row t sees the w tokens t-w+1 .. t. Shapes, dtypes and softmax:
// nsa/attend.h, with S = T.
#pragma once
#include "kernels/nsa/attend.h"

namespace triad {

void nsa_attend_window_forward(Context&, const AttendOut&, const AttendIn&, int64_t w);
void nsa_attend_window_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&, int64_t w);

namespace cuda {
void nsa_attend_window_forward(Context&, const AttendOut&, const AttendIn&, int64_t w);
void nsa_attend_window_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&, int64_t w);
}  // namespace cuda
}  // namespace triad
