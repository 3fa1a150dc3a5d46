// What the backward kernels of the attention branches on Hopper share (bf16 heads of (64, 64), (128, 128) and
// (192, 128)): two kernels for all widths (dq: nsa/sm90/dq.cu, dk and dv: nsa/sm90/dkdv.cu), or one kernel for dq, dk
// and dv together (backward_d64.cu, backward_d128.cu).
//
// With p the softmax times the gate of the branch, a kernel computes for each query row and key
//   p = 2^(s scale_log2 - lse),   ds = p (dout.v - dpsum),   dv += p dout,   dq += ds k,   dk += ds q,
// from two statistics of the row,
//   lse = log2(e) LSE - log2(gate),   dpsum = delta / gate = rowsum(dout o),
// so the gate costs nothing inside the loop; dq and dk are multiplied by the score scale at the end. In p and ds of the
// kernels' comments the gate is always included. A row that sees no key or has gate 0 has lse = inf, so p = 0. Gates
// are >= 0.
#pragma once
#include "kernels/hopper/reduce.cuh"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/nsa/gpu/attend.cuh"

namespace triad::cuda {

// RowStats: the softmax statistics (lse, dpsum) of one query row. Shape [B, Hkv, T, G]: the row of token t and head h
// of the group is t * G + h.
using RowStats = float2;
// The statistics of rows past the end of a tile: they make p and ds 0.
__device__ __forceinline__ RowStats no_row() { return make_float2(INFINITY, 0.0f); }

using RowSource = HeadRows<const __nv_bfloat16>;  // the query rows of one sequence and group

// The range of keys that each row of sequence b sees (DocumentRange). The tokens that list a block belong to the
// block's document, so that listed rows of packed rows need no tables: they see the block's keys up to their own token.
template <bool kListed>
__device__ __forceinline__ decltype(auto) range_of_rows(const KeyRange& range, int b) {
  if constexpr (kListed)
    return (range);
  else
    return DocumentRange(range, b);
}

// Calls f.template operator()<dk / 64, dv / 64>(), for heads of (64, 64), (128, 128) and (192, 128).
template <class F>
void dispatch_panels(const AttendIn& in, F&& f) {
  switch (in.q.size(3)) {
    case 64:
      return f.template operator()<1, 1>();
    case 128:
      return f.template operator()<2, 2>();
    default:
      return f.template operator()<3, 2>();
  }
}

}  // namespace triad::cuda
