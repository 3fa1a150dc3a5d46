// Which tokens of a sequence each rank holds if a group of ranks shares it (`dist.context`: context parallelism with
// zigzag chunks). The sequence is cut into twice as many equal chunks as there are ranks; rank i holds chunk i, and
// chunk i counted from the end. The later a token is, the more keys it sees, so all ranks get as much work. A sequence
// that the chunks do not divide is extended at its end by tokens without a target. They change no result, since no
// token sees a later one and their gradients are 0.
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
using RowLists = std::vector<RowList>;  // one list for each rank of a group
int64_t row_count(const RowList&);

struct SequenceLayout {
  int64_t ranks = 1, rank = 0;  // group size, rank within the group
  int64_t chunk_tokens = 0;

  // Hopper's selection kernel computes tiles of this many tokens, which may not cross a selection block.
  static constexpr int64_t kGpuUnit = 16;
  // T: sequence length. world_rank: rank within the run; groups are adjacent ranks. Chunks are multiples of `unit`
  // tokens, which share lists (ModelConfig::tokens_per_list()), and on a GPU also of kGpuUnit tokens.
  static SequenceLayout of(int64_t T, int64_t ranks, int64_t world_rank, Device device = Device::cpu(),
                           int64_t unit = 1);

  bool shared() const { return ranks > 1; }
  int64_t chunks() const { return shared() ? 2 : 1; }               // chunks a rank
  int64_t local_tokens() const { return chunks() * chunk_tokens; }  // tokens a rank
  int64_t tokens() const { return ranks * local_tokens(); }         // sequence length, with the tokens that extend it
  RowRange chunk(int64_t i) const { return chunk_of(rank, i); }     // this rank's chunk i
  RowRange chunk_of(int64_t owner, int64_t i) const;
  // For ops whose rows are all tokens of this rank.
  RowPart row_part() const;
  // For attention of chunk i, with keys from token first_key on.
  RowPart chunk_part(int64_t i, int64_t first_key = 0) const { return {chunk(i).begin, first_key, tokens()}; }

  // Chunk i's rows in a tensor whose axis 1 is this rank's tokens.
  template <class TensorType>
  TensorType rows_of_chunk(const TensorType& t, int64_t i) const {
    return t.empty() ? t : t.slice(1, i * chunk_tokens, (i + 1) * chunk_tokens);
  }

  // Each rank's tokens.
  RowLists tokens_by_rank() const;
  // All tokens up to each rank's last one: the keys of selected blocks and of dense attention.
  RowLists prefixes() const;
  // For each chunk, the tokens that its tokens' windows contain. w: window width.
  RowLists windows(int64_t w) const;
  // For each chunk, the compressed blocks that begin in it, block c at token c * d.
  RowLists blocks(int64_t l, int64_t d) const;
  RowLists all_blocks(int64_t l, int64_t d) const;  // every block, for each rank
  // For each chunk, the tokens of its blocks. A document may shift a block by up to d - 1 tokens.
  RowLists block_tokens(int64_t l, int64_t d) const;

  // This rank's values from a batch with B sequences; `fill` extends a sequence.
  std::vector<int32_t> cut(std::span<const int32_t> batch, int64_t B, int32_t fill) const;
  // Document bounds in B sequences, for sequences with tokens() tokens: each one's last document is extended.
  std::vector<int32_t> extend(std::span<const int32_t> bounds, int64_t B) const;
};

}  // namespace triad
