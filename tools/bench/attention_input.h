// What `triad bench attention` attends over: q, k and v that are drawn, or a trained model's; and how alike the tokens
// choose then, on which the selected branch's speed depends.
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
  ModelConfig config;  // heads, widths and the nsa group; the rest is not used
};

// Standard normal numbers, many of them, quickly: pieces of one table, each from a random place.
class Normals {
 public:
  explicit Normals(uint64_t stream);
  // At most kMaxHeadWidth numbers, piece i.
  const float* piece(int64_t i) const {
    return table_.data() + start_.below(static_cast<uint64_t>(i), kTable - kMaxHeadWidth);
  }

 private:
  static constexpr uint64_t kSeed = 1;
  static constexpr int64_t kTable = 1 << 22;
  Philox start_;
  std::vector<float> table_ = std::vector<float>(kTable);
};

// [B*T, heads * width] of N(0, 1).
std::vector<std::byte> random_rows(int64_t rows, int64_t heads, int64_t width, DType dtype, const Normals& normals);

// The fused projection's rows [B*T, qkv_width], every element N(0, 1). drift a: q and k go along each head as
// x_t = a x_{t-1} + sqrt(1 - a^2) e_t.
std::vector<std::byte> random_qkv(const AttentionProblem& p, DType dtype, double drift, const Normals& normals);
// With this drift, at 1x8192x64x4x128, a token shares 95% of its blocks with the one before it (randn: 41%); of trained
// models 93 to 97% have been reported.
inline constexpr double kLocalDrift = 0.995;

// What a layer of a trained model computes for text: its shape has to be the problem's, and brings its nsa group along.
struct TrainedInput {
  std::vector<std::string> text;  // --text
  int64_t layer = -1;             // --layer; -1: the middle one
};
std::vector<std::byte> trained_qkv(AttentionProblem& p, const std::string& checkpoint, const TrainedInput& input,
                                   Device device, DType dtype);

// How alike the tokens choose. Lists shorter than the longest are left out: the first tokens have no choice.
struct Overlap {
  double neighbours = 0;           // of a token's blocks, those that the token before has too
  double union4 = 0, union10 = 0;  // blocks that 4, 10 neighbours have together, over those of one
};
Overlap overlap_of(const std::vector<int32_t>& lists, int64_t B, int64_t T, int64_t groups, int64_t n);

}  // namespace triad
