// NSA's compressed branch: row t sees the compressed keys c whose blocks end at or before t, c*d + l <= t + 1.
// k and v are nsa_compress_forward's outputs, [B,Tc,Hkv,dk | dv]. Shapes, dtypes and softmax: nsa/attend.h.
#pragma once
#include "kernels/nsa/attend.h"
#include "kernels/nsa/compress.h"

namespace triad {

void nsa_attend_compressed_forward(Context&, const AttendOut&, const AttendIn&, const CompressionBlocks&);
void nsa_attend_compressed_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                                    const CompressionBlocks&);

namespace cuda {
void nsa_attend_compressed_forward(Context&, const AttendOut&, const AttendIn&, const CompressionBlocks&);
void nsa_attend_compressed_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                                    const CompressionBlocks&);
}  // namespace cuda
}  // namespace triad
