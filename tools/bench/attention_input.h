// Inputs for `triad bench attention`: q, k and v, random or from a trained model. Also measures how much neighbouring
// tokens' selections overlap, on which the selected branch's speed depends.
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
  std::string documents = {};        // length mix (document_mix.h)
  std::vector<int32_t> bounds = {};  // document bounds (nsa/document_tables.h); empty: every row is one document

  AttentionKind kind() const { return config.attention_of(0); }
  // The most documents in a row; 0 without bounds.
  int64_t most_documents() const;
};

// A fast source for standard normal numbers: slices from one table, each at a random offset.
class Normals {
 public:
  explicit Normals(uint64_t stream);
  // Returns table slice i: kMaxHeadWidth numbers.
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

// Random fused qkv projection rows, [B*T, qkv_width] in dtype, every element N(0, 1). With a drift a > 0, q and k in
// each head follow x_t = a x_{t-1} + sqrt(1 - a^2) e_t with e_t ~ N(0, 1), so neighbouring tokens are similar.
std::vector<std::byte> random_qkv(const AttentionProblem& p, DType dtype, double drift, const Normals& normals);
// The drift for input `local`. With it, in shape 1x8192x64x4x128, a token shares 95% of its selected blocks with the
// previous token (41% without drift). For trained models, 93 to 97% have been reported.
inline constexpr double kLocalDrift = 0.995;

struct TrainedInput {
  std::vector<std::string> text;  // --text: text files or token shards, globs
  int64_t layer = -1;             // layer index; -1: the middle one
};
// Throws if `checkpoint` is no model, if its heads and widths differ from p's, if it lacks the layer, or if the text
// has fewer than B*T tokens.
void check_trained(const AttentionProblem& p, const std::string& checkpoint, const TrainedInput& input);
// qkv rows that a trained model's layer computes for a text, after check_trained(). Replaces p.config.nsa by the
// checkpoint's.
std::vector<std::byte> trained_qkv(AttentionProblem& p, const std::string& checkpoint, const TrainedInput& input,
                                   Device device, DType dtype);

// How much neighbouring tokens' selections overlap. Lists shorter than the longest are not counted, because a
// sequence's first tokens select all blocks.
struct Overlap {
  double neighbours = 0;  // share of a token's blocks that the previous token selects too
  // How many distinct blocks 4 (or 10) consecutive tokens select, divided by how many one token selects.
  double union4 = 0, union10 = 0;
};
// Measures the overlap. lists [B, T, groups, n]: selected block indices, -1 in unused entries.
Overlap overlap_of(const std::vector<int32_t>& lists, int64_t B, int64_t T, int64_t groups, int64_t n);

}  // namespace triad
