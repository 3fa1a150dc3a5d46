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

// How the kernels for dq, dk and dv cut the query rows of a block of keys into pieces (window, compressed, dense).
struct PieceCut {
  // Rows of one document are cut at multiples of this many tokens, so that CTAs of all blocks read the same rows at the
  // same time. 0: the rows of each block form equal pieces (find_work), all of which exist.
  int tokens;
  // Few pieces of a packed row have rows of a given block, whose document may be short. There each block's own rows are
  // cut into at most list.pieces / list.blocks equal pieces of at least this many tokens.
  int least_tokens;
};
// The pieces of the block with keys [key0, key_end) of sequence b. Piece i has the rows [begin_of(i), end_of(i)); only
// the pieces first <= i < end have any.
class RowPieces {
 public:
  __device__ __forceinline__ RowPieces(const PieceCut& cut, const KeyRange& keys, int b, int key0, int key_end,
                                       int tokens, int most) {
    const DocumentRange range(keys, b);
    first_row_ = range.first_row(key0), end_row_ = max(first_row_, range.end_row(key_end - 1, tokens));
    if (keys.documents.begins == nullptr) {
      origin_ = 0, each_ = cut.tokens;
    } else {
      origin_ = first_row_, each_ = max(cut.least_tokens, (end_row_ - first_row_ + most - 1) / most);
    }
    first = (first_row_ - origin_) / each_;
    end = first_row_ < end_row_ ? (end_row_ - origin_ + each_ - 1) / each_ : first;
  }
  __device__ __forceinline__ int begin_of(int i) const { return max(first_row_, origin_ + i * each_); }
  __device__ __forceinline__ int end_of(int i) const { return min(end_row_, origin_ + (i + 1) * each_); }
  int first, end;

 private:
  int first_row_, end_row_, origin_, each_;
};

// The arguments of the kernel that sums partial dk and dv. The query rows of a block of keys may be cut into several
// pieces; each piece has then stored fp32 sums [block_keys, dk + dv] in its slot of list.partial. The kernel adds the
// pieces in order. It skips blocks with a single piece, which has stored dk and dv directly.
struct MergeArgs {
  KeyWorkList list;
  GradView dk, dv;
  KeyRange range;
  int tokens, groups;
  PieceCut cut = {};  // as the kernel of the pieces cut contiguous rows
};
void merge_dkdv_sm90(Context&, const char* op, const MergeArgs&, int64_t sequences_and_groups);

}  // namespace triad::cuda
