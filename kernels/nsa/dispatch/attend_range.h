// The window and the compressed branch: every row sees all keys of one range.
#pragma once
#include "kernels/nsa/attend.h"
#include "kernels/nsa/gpu/branch.cuh"

namespace triad::cuda {

void attend_range_forward(Context&, const char* op, const AttendOut&, const AttendIn&, const KeyRange&);
void attend_range_backward(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                           const KeyRange&);

}  // namespace triad::cuda
