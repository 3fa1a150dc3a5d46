// Which tokens of a sequence each rank in a group has, if the group shares it (dist.context). The sequence is cut into
// twice as many equal runs (spans of consecutive tokens) as there are ranks; rank i has run i, and run i counted from
// the end. The later a token is, the more keys it sees, so this gives all ranks as much work. Where runs don't divide
// the sequence, tokens without a target extend it at its end. They change no result, since no token sees a later one
// and their gradients are 0.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/documents.h"

namespace triad {

// Rows [begin, end) in a sequence: tokens, or compressed blocks.
struct RowRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};
// Rows of a tensor: the first range's, then the second's, ... Ranges may overlap.
using RowList = std::vector<RowRange>;
using RowLists = std::vector<RowList>;  // one list per rank in a group
int64_t row_count(const RowList&);

struct ContextLayout {
  int64_t ranks = 1, rank = 0;  // group size, rank within the group
  int64_t run_tokens = 0;       // tokens per run

  // Hopper's selection kernel computes tiles of this many tokens, which may not cross a selection block.
  static constexpr int64_t kGpuUnit = 16;
  // T: tokens per sequence. world_rank: rank within all ranks; groups are adjacent ranks. On a GPU, runs are multiples
  // of kGpuUnit tokens.
  static ContextLayout of(int64_t T, int64_t ranks, int64_t world_rank, Device device = Device::cpu());

  bool shared() const { return ranks > 1; }
  int64_t runs() const { return shared() ? 2 : 1; }          // runs per rank
  int64_t part() const { return runs() * run_tokens; }       // tokens per rank
  int64_t tokens() const { return ranks * part(); }          // tokens per sequence, including those that extend it
  RowRange run(int64_t i) const { return run_of(rank, i); }  // this rank's run i
  RowRange run_of(int64_t which_rank, int64_t i) const;
  // For ops whose rows are all this rank's tokens.
  RowPart row_part() const;
  // For run i's attention, with keys from token first_key on.
  RowPart run_part(int64_t i, int64_t first_key = 0) const { return {run(i).begin, first_key, tokens()}; }

  // Each rank's tokens.
  RowLists parts() const;
  // Tokens up to each rank's last: the keys for selected blocks and dense attention.
  RowLists prefixes() const;
  // For each run, the tokens in its tokens' sliding windows. w: tokens per window.
  RowLists windows(int64_t w) const;
  // For each run, the compressed blocks that begin in it, block c at token c * d.
  RowLists blocks(int64_t l, int64_t d) const;
  RowLists all_blocks(int64_t l, int64_t d) const;  // all blocks, for each rank
  // For each run, these blocks' tokens. A document may shift a block by up to d - 1 tokens.
  RowLists edges(int64_t l, int64_t d) const;

  // This rank's values from a batch with B sequences; `fill` extends a sequence.
  std::vector<int32_t> cut(std::span<const int32_t> batch, int64_t B, int32_t fill) const;
  // Document bounds in B sequences, for sequences with tokens() tokens: each one's last document is extended.
  std::vector<int32_t> extend(std::span<const int32_t> bounds, int64_t B) const;
};

}  // namespace triad
