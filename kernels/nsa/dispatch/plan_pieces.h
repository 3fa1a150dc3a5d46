// plan_pieces() decides how the selected branch's backward cuts the work on dk and dv into pieces (PiecePlan). It needs
// no CUDA, so that tests check it on the CPU.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/common/integer.h"
#include "kernels/nsa/dispatch/choose.h"
#include "kernels/nsa/gpu/key_work_bounds.h"

namespace triad::cuda {

// What the plan depends on in a call with q [B,T,Hq,dk], k [B,S,Hkv,dk], v [B,S,Hkv,dv] and lists [B,T,Hkv,n]. In a
// part of a row T counts the part's queries, and S and the blocks all keys up to the part's end.
struct ListedWork {
  int64_t B, T, Hq, Hkv, dk, dv, n;
  int64_t blocks, block_keys;  // block ids per row; keys per block
  bool is_part;                // the queries are only some of a sequence's tokens (RowPart)
  bool has_documents;          // the rows are packed
};

// The plan for these kernels.
//
// A kernel that also computes dq reads q and dout for a piece's tokens, and adds to their dq. For such a kernel the
// tokens are divided into spans whose q, dout and dq fit into L2 (kSpanBytes), and every piece belongs to one span.
// Each span is then read from memory once, but a block has a partial sum for each span. A short sequence is one span.
// If ranks share a row, a call has few queries but sees all blocks before them, and the partial sums could need more
// memory than all else. Spans are then made longer, until a span has kLeastOfBlock queries per block on average and all
// partial sums together take about kMostPartial bytes at most.
inline PiecePlan plan_pieces(const ListedWork& w, Backward kernels) {
  constexpr int64_t kParts = 8, kMostParts = 32, kSpanBytes = 48 << 20, kLeastOfBlock = 16,
                    kMostPartial = int64_t{32} << 30;
  int64_t long_piece = kWorkTokens, short_piece = kWorkTokens / 4;
  switch (kernels) {
    case Backward::sm90:
    case Backward::portable:
      return {kParts, kParts, kWorkTokens};  // they do not compute dq
    case Backward::sm90_d64:
      long_piece = kWorkTokens * 3 / 4;
      break;
    case Backward::sm90_d128:
      long_piece = kWorkTokens / 2;
      break;
    case Backward::portable_dq_dk_dv:
      long_piece = short_piece = kDqWorkTokens;
      break;
  }
  const int64_t bytes = w.T * (w.Hq / w.Hkv) * (6 * w.dk + 2 * w.dv);
  int64_t parts = kParts, cut = kParts;
  while (cut > 1 && bytes * cut > kSpanBytes * parts) cut /= 2;
  if (cut == 1) parts = std::clamp(ceil_div(bytes, kSpanBytes), kParts, kMostParts);
  const int64_t partial_bytes = w.B * w.Hkv * w.blocks * w.block_keys * (w.dk + w.dv) * int64_t{4};
  const auto too_short = [&] {
    return w.T * w.n * cut < kLeastOfBlock * w.blocks * parts || partial_bytes * parts > kMostPartial * cut;
  };
  if (w.is_part)
    while (cut < parts && too_short()) parts > kParts ? parts = std::max(kParts, parts / 2) : cut *= 2;
  // The documents' lengths are known on the GPU alone. Most are shorter than a row, so there are fewer and longer spans
  // (measured, tests/baselines/findings/documents.md).
  if (w.has_documents) return {kParts, std::max<int64_t>(cut, 2), long_piece, /*merges=*/kernels == Backward::sm90_d64};
  return {parts, cut, cut < parts ? short_piece : long_piece};
}

}  // namespace triad::cuda
