// What the attention branches' backward kernels on Hopper share (bf16 heads (64, 64), (128, 128) and (192, 128)): two
// kernels for all widths (dq: nsa/sm90/dq.cu, dk and dv: nsa/sm90/dkdv.cu), or one kernel for dq, dk and dv together
// (backward_d64.cu, backward_d128.cu).
// nsa/gpu/row_stats.cuh has their formulas.
#pragma once
#include "kernels/hopper/reduce.cuh"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/nsa/gpu/attend.cuh"
#include "kernels/nsa/gpu/row_stats.cuh"

namespace triad::cuda {

using RowSource = HeadRows<const __nv_bfloat16>;  // the query rows in one sequence and group

// How a CTA's rows and keys are given. kListed: its rows are those of listed tokens, not contiguous. kAlternates: it
// has 64 keys, and the MMA warpgroups alternate stages; otherwise 128 keys, 64 for each, and they share the stages.
struct ContiguousRows {
  static constexpr bool kListed = false, kAlternates = false;
};
struct ListedRows {  // blocks of up to 64 keys
  static constexpr bool kListed = true, kAlternates = true;
};
struct WideListedRows {  // longer blocks
  static constexpr bool kListed = true, kAlternates = false;
};

// The key range that each row in sequence b sees (DocumentRange). The tokens that list a block belong to the block's
// document, so listed rows in packed rows need no tables: they see the block's keys up to their own token.
template <bool kListed>
__device__ __forceinline__ decltype(auto) range_of_rows(const KeyRange& range, int b) {
  if constexpr (kListed)
    return (range);
  else
    return DocumentRange(range, b);
}

// Calls f.template operator()<dk / 64, dv / 64>(), for heads (64, 64), (128, 128) and (192, 128).
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
