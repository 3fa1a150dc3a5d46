// The backward of the selected branch computes dk and dv of a block from the tokens that list it, cut into pieces.
// PiecePlan: how they are cut. KeyWorkBounds: the most pieces and partial sums. No CUDA: CPU tests check the bounds.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/common/integer.h"

namespace triad::cuda {

// The most tokens that a piece of the selected branch may have.
inline constexpr int kWorkTokens = 2048;
// The same for the portable kernel that also computes dq. A CTA holds the list of these tokens in shared memory; with
// heads of 64, two CTAs then fit on an SM with 100 KiB.
inline constexpr int kDqWorkTokens = 512;

// How the work is cut. The tokens that have lists are divided into `parts` equal parts, which are indexed concurrently.
// Each `cut` consecutive parts form a run. A piece has at most most_tokens tokens, all of one run. merges: short
// documents of packed rows may share a piece (KeyWork::merged), which needs fewer pieces than the bounds below.
struct PiecePlan {
  int64_t parts, cut, most_tokens;
  bool merges = false;
};

// The tokens of a row, the entries of each token's block list, and the blocks.
struct KeyWorkShape {
  int64_t T, n, block_keys;
  int64_t blocks;       // block ids of the row (common/documents.h)
  int64_t queries = 0;  // the tokens that have lists, the last ones of the row (RowPart); 0: all T
};

struct KeyWorkBounds {
  int64_t pieces, slots;  // for each sequence and group
};

// Upper bounds over all lists that name blocks of their token's document, and over all documents that a row of these
// block ids may have. They are needed before the documents are known, because a recorded graph is launched with other
// documents in every step. A block's tokens in a run are cut into full pieces of most_tokens and at most one piece that
// is not full. A block without tokens has one empty piece. A block with several pieces needs a slot for each of them.
//
// * Full pieces: at most `full`, because all lists together have T * n entries (queries * n, if given).
// * Pieces that are not full, or empty: one for each block id and, for each further run in which the block has tokens,
//   one more. A block has tokens in a further run only if its document crosses the boundary between two runs after the
//   block's begin. One document crosses a boundary at token e, and at most ceil(e / block_keys) of its blocks begin
//   before it. `further` is the sum of this over the boundaries, whatever the number of documents.
// * Slots of pieces that are not full: a block that has several pieces has tokens in several runs, or a full piece
//   beside it. Blocks of the first kind have `further` pieces together, and one more each. They belong to documents
//   that cross a boundary, at most one document for each boundary, and begin before the last boundary E. So there are
//   at most ceil(E / block_keys) + boundaries - 1 of them, because these documents' tokens do not overlap and only the
//   last block of a document is short. Blocks of the second kind have one such piece each and are at most `full`.
inline KeyWorkBounds key_work_bounds(const KeyWorkShape& s, const PiecePlan& plan) {
  const int64_t queries = s.queries > 0 ? s.queries : s.T, run = ceil_div(queries, plan.parts) * plan.cut,
                full = queries * s.n / plan.most_tokens;
  int64_t further = 0, boundaries = 0, crossing = 0;  // crossing: blocks with tokens in several runs
  for (int64_t end = s.T - queries + run; end < s.T; end += run) {
    ++boundaries;
    further += ceil_div(end, s.block_keys);
    crossing = ceil_div(end, s.block_keys) + boundaries - 1;
  }
  const int64_t several = further + std::min(crossing, s.blocks) + std::min(full, s.blocks);
  return {.pieces = full + s.blocks + further, .slots = full + std::min(several, s.blocks + further)};
}

}  // namespace triad::cuda
