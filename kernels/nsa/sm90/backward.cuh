// Backward of the attention branches on Hopper for bf16 heads of (64, 64), (128, 128) and (192, 128): which calls it
// takes, and what its two kernels (keys: nsa/sm90/dkdv.cu; rows: nsa/sm90/dq.cuh) share.
//
// Of a row both kernels need two numbers beside q and dout. With pg = gate * p,
//   pg = 2^(s * scale_log2 - shift),       shift = lse * log2(e) - log2(gate),
//   gate dv: sum pg dout,   ds = pg * (dout.v - center),   center = delta / gate  (= dout.o),
// so the gate costs nothing inside. A row without keys or with gate 0 has shift = inf: pg = 0. Gates are >= 0.
#pragma once
#include "kernels/hopper/reduce.cuh"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/nsa/gpu/attend.cuh"

namespace triad::cuda {

// (shift, center) of row t * G + h of (b, g), at [(b * Hkv + g) * T * G + t * G + h].
using RowStats = float2;
// A (b, g) slice of a view whose strides fit 32 bits: the address of a row is then two multiply-adds.
struct RowSource {
  const __nv_bfloat16* base;
  int row, head;
  __device__ __forceinline__ RowSource(const View<const __nv_bfloat16>& v, int b, int first_head)
      : base(v.at(b, 0, first_head)), row(static_cast<int>(v.row)), head(static_cast<int>(v.head)) {}
  __device__ __forceinline__ const __nv_bfloat16* at(int r, int h) const {
    return base + static_cast<int64_t>(r) * row + static_cast<int64_t>(h) * head;
  }
};

// Heads of (64, 64), (128, 128) and (192, 128): f.template operator()<dk / 64, dv / 64>().
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

// dk and dv of the blocks whose rows several CTAs had: each left fp32 sums [block_keys, dk + dv] in its slot of
// list.partial, and they are added here, pieces in order. Nothing to do where no block has several.
struct MergeArgs {
  KeyWorkList list;
  GradView dk, dv;
  KeyRange range;
  int groups;
  // Contiguous rows cut at multiples of so many tokens: a block has no piece before its first row. 0: it has all.
  int part_tokens = 0;
};
void merge_dkdv_sm90(Context&, const char* op, const MergeArgs&, int64_t sequences_and_groups);

}  // namespace triad::cuda
