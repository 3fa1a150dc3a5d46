// Inputs of `triad bench attention`: q, k and v at random or from a trained model; and how much the selections of
// neighbouring tokens overlap, which decides the selected branch's speed.
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
  ModelConfig config;  // only heads, widths and the nsa group are used
};

// A fast source of standard normal numbers: slices of one table, each at a random offset.
class Normals {
 public:
  explicit Normals(uint64_t stream);
  // Slice i: kMaxHeadWidth numbers.
  const float* piece(int64_t i) const {
    return table_.data() + start_.below(static_cast<uint64_t>(i), kTable - kMaxHeadWidth);
  }

 private:
  static constexpr uint64_t kSeed = 1;
  static constexpr int64_t kTable = 1 << 22;
  Philox start_;
  std::vector<float> table_ = std::vector<float>(kTable);
};

// Rows [B*T, heads * width] in dtype, every element N(0, 1).
std::vector<std::byte> random_rows(int64_t rows, int64_t heads, int64_t width, DType dtype, const Normals& normals);

// Rows of the fused qkv projection, [B*T, qkv_width] in dtype, every element N(0, 1). With drift a, q and k of each
// head follow x_t = a x_{t-1} + sqrt(1 - a^2) e_t with e_t ~ N(0, 1).
std::vector<std::byte> random_qkv(const AttentionProblem& p, DType dtype, double drift, const Normals& normals);
// With this drift and the shape 1x8192x64x4x128, a token shares 95% of its selected blocks with the previous token (41%
// without drift). 93 to 97% have been reported for trained models.
inline constexpr double kLocalDrift = 0.995;

struct TrainedInput {
  std::vector<std::string> text;  // --text: text files or token shards, globs
  int64_t layer = -1;             // --layer; -1: the middle one
};
// The qkv rows that a layer of a trained model computes for text. Replaces p.config.nsa by the checkpoint's. Throws if
// the model's heads and widths are not p's, or the text has fewer than B*T tokens.
std::vector<std::byte> trained_qkv(AttentionProblem& p, const std::string& checkpoint, const TrainedInput& input,
                                   Device device, DType dtype);

// How much the selections of neighbouring tokens overlap. Lists shorter than the longest are left out: the first tokens
// of a sequence select all blocks.
struct Overlap {
  double neighbours = 0;  // share of a token's blocks that the previous token selects too
  // The number of distinct blocks that 4 (10) consecutive tokens select, divided by the number that one token selects.
  double union4 = 0, union10 = 0;
};
// lists [B, T, groups, n]: selected block indices, -1 in unused slots.
Overlap overlap_of(const std::vector<int32_t>& lists, int64_t B, int64_t T, int64_t groups, int64_t n);

}  // namespace triad
