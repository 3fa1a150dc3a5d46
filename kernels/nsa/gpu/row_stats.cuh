// The query rows' softmax statistics that the bf16 backward kernels read: Hopper's (nsa/sm90/backward.cuh) and the
// portable one for dq, dk and dv (nsa/gpu/dkdv.cu).
//
// Let s = q.k be the score for a query row and a key, and p the softmax times the branch's gate. With the row's two
// statistics in the branch, lse and dpsum, a kernel computes
//   p = 2^(s scale_log2 - lse),   ds = p (dout.v - dpsum),   dv += p dout,   dq += ds k,   dk += ds q,
// where scale_log2 = log2(e) / sqrt(dk). These formulas leave out the factor 1 / sqrt(dk) in dq and dk. A kernel
// multiplies dk by it at the end, and dq whenever it adds to dq in global memory. The statistics are
//   lse = log2(e) LSE - log2(gate),   dpsum = delta / gate = rowsum(dout o),
// where LSE and delta are AttendGradIn::lse and AttendGradIn::delta.
// The gate, which must be >= 0, is part of lse and therefore takes no instruction per score. In this file and in the
// kernels that read these statistics, p and ds include the gate. A row that sees no key, or has gate 0, has lse = inf,
// so its p is 0.
#pragma once
#include "kernels/nsa/attend.h"

namespace triad::cuda {

using RowStats = float2;  // x: lse, y: dpsum
// Statistics for a row without weight: p and ds are 0. Hopper's kernels also use them for rows that do not exist.
__device__ __forceinline__ RowStats no_weight() { return make_float2(INFINITY, 0.0f); }

// Returns the RowStats for all query rows in a call, [B * Hkv, T * G, 2] f32. The row for token t, counted from the
// first token in the call's q, and the group's head h is t * G + h.
Tensor compute_row_stats(Context&, Scratch::Scope&, const AttendGradIn&, const AttendIn&);

}  // namespace triad::cuda
