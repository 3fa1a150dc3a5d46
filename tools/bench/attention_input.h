// Inputs of `triad bench attention`: q, k and v, random or from a trained model. Also measures how much the selections
// of neighbouring tokens overlap, on which the selected branch's speed depends.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/rng.h"
#include "model/config.h"

namespace triad {

inline constexpr int64_t kMaxHeadWidth = 256;

struct AttentionProblem {
  std::string name;
  int64_t B, T;
  ModelConfig config;                // only heads, widths and the group nsa are used
  std::string documents = {};        // the mix of lengths (document_mix.h)
  std::vector<int32_t> bounds = {};  // bounds of documents (nsa/document_tables.h); empty: every row is one document

  // The largest number of documents in a row; 0 without bounds.
  int64_t most_documents() const;
};

// A fast source of standard normal numbers: slices of one table, each at a random offset.
class Normals {
 public:
  explicit Normals(uint64_t stream);
  // Returns slice i of the table: kMaxHeadWidth numbers.
  const float* piece(int64_t i) const {
    return table_.data() + start_.below(static_cast<uint64_t>(i), kTable - kMaxHeadWidth);
  }

 private:
  static constexpr uint64_t kSeed = 1;
  static constexpr int64_t kTable = 1 << 22;
  Philox start_;
  std::vector<float> table_ = std::vector<float>(kTable);
};

// Random rows [B*T, heads * width] in dtype, every element N(0, 1).
std::vector<std::byte> random_rows(int64_t rows, int64_t heads, int64_t width, DType dtype, const Normals& normals);

// Random rows of the fused qkv projection, [B*T, qkv_width] in dtype, every element N(0, 1). With a drift a > 0, q and
// k of each head follow x_t = a x_{t-1} + sqrt(1 - a^2) e_t with e_t ~ N(0, 1), so neighbouring tokens are similar.
std::vector<std::byte> random_qkv(const AttentionProblem& p, DType dtype, double drift, const Normals& normals);
// The drift of the input `local`. With it and the shape 1x8192x64x4x128, a token shares 95% of its selected blocks with
// the previous token (41% without drift). For trained models, 93 to 97% have been reported.
inline constexpr double kLocalDrift = 0.995;

struct TrainedInput {
  std::vector<std::string> text;  // --text: text files or token shards, globs
  int64_t layer = -1;             // index of the layer; -1: the middle one
};
// Throws if `checkpoint` is no model, if its heads and widths differ from those of p, if it lacks the layer, or if the
// text has fewer than B*T tokens.
void check_trained(const AttentionProblem& p, const std::string& checkpoint, const TrainedInput& input);
// The rows of qkv that a layer of a trained model computes for a text, after check_trained(). Replaces p.config.nsa by
// the checkpoint's.
std::vector<std::byte> trained_qkv(AttentionProblem& p, const std::string& checkpoint, const TrainedInput& input,
                                   Device device, DType dtype);

// How much the selections of neighbouring tokens overlap. Lists shorter than the longest are not counted, because the
// first tokens of a sequence select all blocks.
struct Overlap {
  double neighbours = 0;  // the share of a token's blocks that the previous token selects too
  // Number of distinct blocks that 4 (or 10) consecutive tokens select, divided by the number that one token selects.
  double union4 = 0, union10 = 0;
};
// Measures the overlap. lists [B, T, groups, n]: indices of selected blocks, -1 in unused entries.
Overlap overlap_of(const std::vector<int32_t>& lists, int64_t B, int64_t T, int64_t groups, int64_t n);

}  // namespace triad
