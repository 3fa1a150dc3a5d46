// The softmax statistics of query rows that the bf16 backward kernels read: those of Hopper (nsa/sm90/backward.cuh) and
// the portable one for dq, dk and dv (nsa/gpu/dkdv.cu).
//
// With p the softmax times the gate of the branch, a kernel computes for each query row and key
//   p = 2^(s scale_log2 - lse),   ds = p (dout.v - dpsum),   dv += p dout,   dq += ds k,   dk += ds q,
// from two statistics of the row and branch,
//   lse = log2(e) LSE - log2(gate),   dpsum = delta / gate = rowsum(dout o),
// so the gate costs nothing inside the loop; dq and dk are multiplied by the score scale at the end. In p and ds of the
// kernels' comments the gate is always included. A row that sees no key or has gate 0 has lse = inf, so p = 0. Gates
// are >= 0. Here s = q.k, LSE and delta are AttendGradIn::lse and delta, and scale_log2 is log2(e) / sqrt(dk).
#pragma once
#include "kernels/nsa/attend.h"

namespace triad::cuda {

using RowStats = float2;  // lse, dpsum
// The statistics with which p and ds are 0: those of rows that see no key or have gate 0, and in Hopper's kernels of
// rows that do not exist.
__device__ __forceinline__ RowStats no_row() { return make_float2(INFINITY, 0.0f); }

// Returns the RowStats of all query rows of a call, [B * Hkv, T * G, 2] f32. The row of token t, counted from the
// first token of the call's q, and of head h of the group is t * G + h.
Tensor compute_row_stats(Context&, Scratch::Scope&, const AttendGradIn&, const AttendIn&);

}  // namespace triad::cuda
