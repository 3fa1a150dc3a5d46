// Chooses cuBLASLt's algorithm for a linear layer in bf16, where measurements suggest a faster one than the first in
// cuBLASLt's heuristic. The choice is a pure function of the sizes, so a product has the same algorithm, and therefore
// the same bits, in every run. The table was measured on an H200 and the rule on an H100 SXM
// (tests/baselines/findings/ops.md), which both have 132 SMs. On other cards the heuristic chooses.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>

#include "kernels/common/integer.h"

namespace triad::cuda {

// The three products in a linear layer y = x w^T, where x is [rows,in], w is [out,in] and y is [rows,out]. dy, dx and
// dw are the gradients for y, x and w.
//   forward   y  [rows,out] = x w^T    each element sums `in` terms
//   dx        dx [rows,in]  = dy w     each element sums `out` terms
//   dw        dw [out,in]   = dy^T x   each element sums `rows` terms
enum class LinearPass { forward, dx, dw };

// An algorithm by cuBLASLt's codes cublasLtMatmulTile_t, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION (the schedule, which
// cuBLASLt does not document) and cublasLtClusterShape_t. `split` is how many split-K parts there are.
// CUBLASLT_ALGO_CONFIG_ID is always kTunedAlgorithmId.
struct TunedAlgorithm {
  uint32_t tile, schedule;
  uint16_t cluster;
  int32_t split;
  bool operator==(const TunedAlgorithm&) const = default;
};
inline constexpr int32_t kTunedAlgorithmId = 66;
inline constexpr int64_t kTunedSms = 132;
// Codes for two-tile clusters: with the same result rows (CUBLASLT_CLUSTER_SHAPE_2x1x1), or with the same columns
// (1x2x1).
inline constexpr uint16_t kTwoAlongColumns = 3, kTwoAlongRows = 5;

// The algorithm for one pass in a layer with these `in` and `out` and with min_rows to max_rows rows. The tiles 151,
// 201 and 31 have 96 x 192, 176 x 128 and 192 x 128 elements (columns x rows).
struct TunedProduct {
  LinearPass pass;
  int64_t in, out;
  int64_t min_rows, max_rows;
  TunedAlgorithm algorithm;
};
inline constexpr TunedProduct kTunedProducts[] = {
    {LinearPass::dw, 768, 768, 16384, INT64_MAX, {151, 0, kTwoAlongRows, 4}},
    {LinearPass::dw, 768, 3072, 16384, INT64_MAX, {151, 2, kTwoAlongRows, 1}},
    {LinearPass::dw, 3072, 768, 16384, INT64_MAX, {151, 2, kTwoAlongRows, 1}},
    {LinearPass::forward, 768, 50304, 1024, 4096, {201, 2, kTwoAlongRows, 1}},
    {LinearPass::dx, 768, 50304, 1024, 2048, {31, 6, kTwoAlongRows, 2}},
    {LinearPass::dx, 768, 50304, 4096, 4096, {31, 6, kTwoAlongRows, 1}},
};

// A CTA computes one product tile: `rows` rows and `columns` columns in the result. (y [rows,out] has `out` columns, dx
// [rows,in] and dw [out,in] have `in`.) `code` is cuBLASLt's cublasLtMatmulTile_t for this size.
struct MatmulTile {
  int64_t columns, rows;
  uint32_t code;
};
// The tiles that tuned_algorithm() knows besides those in kTunedProducts:
//   kTiles           for the passes forward and dx. It takes the one that wastes the least time (tile_waste()).
//   kClassifierTile  for dw of the classifier, the model's last layer, whose outputs are the logits of the vocabulary
inline constexpr MatmulTile kTiles[] = {{128, 176, 409}, {128, 168, 408}, {128, 160, 29},
                                        {128, 152, 407}, {128, 144, 406}, {128, 136, 405}};
inline constexpr MatmulTile kClassifierTile = {128, 256, 23};

// The waste in computing a `rows` x `columns` result by tiles with this size. The SMs compute the tiles in waves: in
// each wave every SM computes one tile, and some SMs may have no tile in the last wave. So the SMs have time for waves
// x SMs x (elements per tile) elements. tile_waste is this number divided by rows x columns; 1 is the least. Clusters
// have two tiles along the columns, so the tile count along the columns is rounded up to an even number.
inline double tile_waste(const MatmulTile& tile, int64_t columns, int64_t rows) {
  const int64_t tiles = round_up(ceil_div(columns, tile.columns), 2) * ceil_div(rows, tile.rows);
  const int64_t waves = ceil_div(tiles, kTunedSms);
  return static_cast<double>(waves * kTunedSms * tile.columns * tile.rows) / static_cast<double>(columns * rows);
}

// The classifier computes its products for this many rows at a time. A test checks that it equals
// ClassifierOptions::chunk_rows.
inline constexpr int64_t kClassifierRows = 4096;

// The algorithm for a product, or nothing where cuBLASLt's heuristic shall choose.
inline std::optional<TunedAlgorithm> tuned_algorithm(LinearPass pass, int64_t in, int64_t out, int64_t rows) {
  for (const TunedProduct& t : kTunedProducts)
    if (t.pass == pass && t.in == in && t.out == out && t.min_rows <= rows && rows <= t.max_rows) return t.algorithm;

  constexpr double kMostWaste = 1.04;    // the heuristic's algorithm may be faster with more waste
  constexpr int64_t kFewestRows = 1024;  // products with fewer rows were not measured
  constexpr int64_t kShortestSum = 768;  // sums with fewer terms were not measured
  if (pass == LinearPass::dw) {
    // This is for the classifier, which is recognized by its sizes. For other layers, no algorithm beyond the table's
    // was found to compute dw faster. The result dw has `out` rows and `in` columns.
    constexpr int64_t kSmallestVocabulary = 32768;
    if (rows != kClassifierRows || out < kSmallestVocabulary) return {};
    if (!(tile_waste(kClassifierTile, in, out) <= kMostWaste)) return {};
    return TunedAlgorithm{kClassifierTile.code, 4, kTwoAlongColumns, 1};
  }
  const int64_t columns = pass == LinearPass::forward ? out : in, sum = pass == LinearPass::forward ? in : out;
  if (rows < kFewestRows || sum < kShortestSum || columns == 0) return {};
  const auto waste = [&](const MatmulTile& tile) { return tile_waste(tile, columns, rows); };
  const MatmulTile& best = *std::ranges::min_element(kTiles, {}, waste);
  if (waste(best) > kMostWaste) return {};
  return TunedAlgorithm{best.code, 1, kTwoAlongColumns, 1};
}

}  // namespace triad::cuda
