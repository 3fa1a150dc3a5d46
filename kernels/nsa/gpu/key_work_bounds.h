// The selected branch's backward computes a block's dk and dv from the tokens that list it, cut into pieces. PiecePlan:
// how they are cut. KeyWorkBounds: the most pieces and partial sums. No CUDA: CPU tests check the bounds.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/common/integer.h"

namespace triad::cuda {

// The most tokens that a selected branch piece may have.
inline constexpr int kWorkTokens = 2048;
// The same for the portable kernel that also computes dq. A CTA holds the list of these tokens in shared memory; at
// head width 64, two CTAs then fit on an SM with 100 KiB.
inline constexpr int kDqWorkTokens = 512;

// How the work is cut. The tokens that have lists are divided into `parts` equal parts, which are indexed concurrently.
// Each `cut` consecutive parts form a span. A piece has at most most_tokens tokens, all in one span. merges: short
// documents in packed rows may share a piece (KeyWork::merged), which needs fewer pieces than the bounds below.
struct PiecePlan {
  int64_t parts, cut, most_tokens;
  bool merges = false;
};

// A row's tokens, the entries in each token's block list, and the blocks.
struct KeyWorkShape {
  int64_t T, n, block_keys;
  int64_t blocks;       // block ids per row (common/documents.h)
  int64_t queries = 0;  // the tokens that have lists, the row's last ones (RowPart); 0: all T
};

struct KeyWorkBounds {
  int64_t pieces, slots;  // counts per sequence and group
};

// Upper bounds over all lists that name blocks in their token's document, and over all documents that a row with these
// block ids may have. They are needed before the documents are known, because a recorded graph is launched with other
// documents in every step. A block's tokens in a span are cut into full pieces (most_tokens) and at most one piece that
// is not full. A block without tokens has one empty piece. A block with several pieces needs a slot for each.
//
// * Full pieces: at most `full`, because all lists together have T * n entries (queries * n, if given).
// * Pieces that are not full, or empty: one for each block id and, for each further span in which the block has tokens,
//   one more. A block has tokens in a further span only if its document crosses the boundary between two spans after
//   the block's begin. One document crosses a boundary at token e, and at most ceil(e / block_keys) of its blocks begin
//   before it. `further` sums this over the boundaries, however many documents there are.
// * Slots for pieces that are not full: a block that has several pieces has tokens in several spans, or a full piece
//   beside it. The first kind have `further` pieces together, and one more each. They belong to documents that cross a
//   boundary, at most one document for each boundary, and begin before the last boundary E. So there are at most ceil(E
//   / block_keys) + boundaries - 1 of them, because these documents' tokens don't overlap and only a document's last
//   block is short. The second kind have one such piece each and are at most `full`.
inline KeyWorkBounds key_work_bounds(const KeyWorkShape& s, const PiecePlan& plan) {
  const int64_t queries = s.queries > 0 ? s.queries : s.T, span = ceil_div(queries, plan.parts) * plan.cut,
                full = queries * s.n / plan.most_tokens;
  int64_t further = 0, boundaries = 0, crossing = 0;  // crossing: blocks with tokens in several spans
  for (int64_t end = s.T - queries + span; end < s.T; end += span) {
    ++boundaries;
    further += ceil_div(end, s.block_keys);
    crossing = ceil_div(end, s.block_keys) + boundaries - 1;
  }
  const int64_t several = further + std::min(crossing, s.blocks) + std::min(full, s.blocks);
  return {.pieces = full + s.blocks + further, .slots = full + std::min(several, s.blocks + further)};
}

}  // namespace triad::cuda
