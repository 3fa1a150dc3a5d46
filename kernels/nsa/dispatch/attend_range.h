// GPU attention whose tokens see all keys in one range: the window branch, the compressed branch, dense attention. Both
// functions choose the kernels (choose.h), record the choice under the name `op`, and queue the kernels. Operands and
// results are as in nsa/attend.h.
#pragma once
#include "kernels/nsa/attend.h"
#include "kernels/nsa/gpu/branch.cuh"

namespace triad::cuda {

void attend_range_forward(Context&, const char* op, const AttendOut&, const AttendIn&, const KeyRange&);
void attend_range_backward(Context&, const char* op, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                           const KeyRange&);

}  // namespace triad::cuda
