// Which tokens of a sequence each rank of a group has, if the ranks of the group share it (dist.context): rank i has
// the tokens [i * part, (i + 1) * part). Where the ranks do not divide the sequence, it is extended at its end by
// tokens without a target. They change no result, since no token sees a later one and their gradients are 0.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/documents.h"

namespace triad {

// Rows [begin, end) of a sequence: tokens, or compressed blocks.
struct RowRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};
RowRange overlap(const RowRange&, const RowRange&);  // of size 0 if they have no row in common
using RowRanges = std::vector<RowRange>;             // one for each rank of a group

struct ContextLayout {
  int64_t ranks = 1, rank = 0;  // of the group
  int64_t part = 0;             // tokens that a rank has

  // The selection kernel of Hopper computes tiles of this many tokens, which may not cross a selection block.
  static constexpr int64_t kGpuUnit = 16;
  // T: tokens of a sequence. world_rank: of the run; groups are adjacent ranks. On a GPU parts are
  // multiples of kGpuUnit.
  static ContextLayout of(int64_t T, int64_t ranks, int64_t world_rank, Device device = Device::cpu()) {
    const int64_t unit = ranks > 1 && device.is_cuda() ? kGpuUnit : 1;
    return {ranks, world_rank % ranks, round_up(ceil_div(T, ranks), unit)};
  }
  bool shared() const { return ranks > 1; }
  int64_t tokens() const { return ranks * part; }  // of the sequence, with those that extend it
  int64_t first() const { return rank * part; }    // the first token of this rank
  // For the ops: the tokens of q, and all keys.
  RowPart row_part() const { return shared() ? RowPart{first(), 0, tokens()} : RowPart{}; }

  // The tokens of each rank.
  RowRanges parts() const;
  // The tokens up to the last one of each rank: the keys of selected blocks and of dense attention.
  RowRanges prefixes() const;
  // The tokens that the windows of each rank's tokens contain. w: tokens of a window.
  RowRanges windows(int64_t w) const;
  // The compressed blocks that begin in each rank's tokens, block c at token c * d.
  RowRanges blocks(int64_t l, int64_t d) const;
  RowRanges all_blocks(int64_t l, int64_t d) const;  // all of them, for each rank
  // The tokens of these blocks. A document may shift a block by up to d - 1 tokens.
  RowRanges edges(int64_t l, int64_t d) const;

  // This rank's values of a batch of B sequences; `fill` extends a sequence.
  std::vector<int32_t> cut(std::span<const int32_t> batch, int64_t B, int32_t fill) const;
  // The bounds of the documents in B sequences, for sequences of tokens() tokens: the last document of each is
  // extended.
  std::vector<int32_t> extend(std::span<const int32_t> bounds, int64_t B) const;
};

}  // namespace triad
