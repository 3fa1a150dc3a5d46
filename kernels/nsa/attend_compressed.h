// NSA's compressed branch: row t sees the compressed keys c with c*d + l <= t + 1.
#pragma once
#include "kernels/nsa/attend.h"

namespace triad {

struct CompressedOptions {
  int64_t l = 32, d = 16;
};

void nsa_attend_compressed_forward(Context&, const AttendOut&, const AttendIn&, const CompressedOptions&);
void nsa_attend_compressed_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                                    const CompressedOptions&);

namespace cuda {
void nsa_attend_compressed_forward(Context&, const AttendOut&, const AttendIn&, const CompressedOptions&);
void nsa_attend_compressed_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                                    const CompressedOptions&);
}  // namespace cuda
}  // namespace triad
