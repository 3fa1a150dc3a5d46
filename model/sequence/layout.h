// Which tokens of a sequence each rank of a group has, if the ranks of the group share it (dist.context). The sequence
// is cut into twice as many equal runs as there are ranks; rank i has run i, and run i counted from the end. The later
// a token is, the more keys it sees, so this gives all ranks as much work. Where the runs do not divide the sequence,
// it is extended at its end by tokens without a target. They change no result, since no token sees a later one and
// their gradients are 0.
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
// Rows of a tensor: those of the first range, then those of the second, ... Ranges may overlap.
using RowList = std::vector<RowRange>;
using RowLists = std::vector<RowList>;  // one for each rank of a group
int64_t row_count(const RowList&);

struct ContextLayout {
  int64_t ranks = 1, rank = 0;  // of the group
  int64_t run_tokens = 0;       // tokens of a run

  // The selection kernel of Hopper computes tiles of this many tokens, which may not cross a selection block.
  static constexpr int64_t kGpuUnit = 16;
  // T: tokens of a sequence. world_rank: of the run; groups are adjacent ranks. On a GPU runs are multiples of kGpuUnit
  // tokens.
  static ContextLayout of(int64_t T, int64_t ranks, int64_t world_rank, Device device = Device::cpu());

  bool shared() const { return ranks > 1; }
  int64_t runs() const { return shared() ? 2 : 1; }          // of a rank
  int64_t part() const { return runs() * run_tokens; }       // tokens of a rank
  int64_t tokens() const { return ranks * part(); }          // of the sequence, with those that extend it
  RowRange run(int64_t i) const { return run_of(rank, i); }  // this rank's run i
  RowRange run_of(int64_t of_rank, int64_t i) const;
  // For ops whose rows are all tokens of this rank.
  RowPart row_part() const;
  // For attention of run i, with keys from token first_key on.
  RowPart run_part(int64_t i, int64_t first_key = 0) const { return {run(i).begin, first_key, tokens()}; }

  // The tokens of each rank.
  RowLists parts() const;
  // The tokens up to the last one of each rank: the keys of selected blocks and of dense attention.
  RowLists prefixes() const;
  // For each run, the tokens that the windows of its tokens contain. w: tokens of a window.
  RowLists windows(int64_t w) const;
  // For each run, the compressed blocks that begin in it, block c at token c * d.
  RowLists blocks(int64_t l, int64_t d) const;
  RowLists all_blocks(int64_t l, int64_t d) const;  // all of them, for each rank
  // For each run, the tokens of these blocks. A document may shift a block by up to d - 1 tokens.
  RowLists edges(int64_t l, int64_t d) const;

  // This rank's values of a batch of B sequences; `fill` extends a sequence.
  std::vector<int32_t> cut(std::span<const int32_t> batch, int64_t B, int32_t fill) const;
  // The bounds of the documents in B sequences, for sequences of tokens() tokens: the last document of each is
  // extended.
  std::vector<int32_t> extend(std::span<const int32_t> bounds, int64_t B) const;
};

}  // namespace triad
