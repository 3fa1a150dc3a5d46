// Which algorithm of cuBLASLt multiplies a linear layer in bf16, where measurements found a faster one than the first
// of cuBLASLt's heuristic. The choice is a pure function of the sizes. Nothing is timed at startup, so a product has
// the same algorithm, and therefore the same bits, in every run. The algorithms were measured on an H200 and on an H100
// (tests/baselines/notes/ops.md), which both have 132 SMs; on other cards the heuristic chooses.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>

namespace triad::cuda {

// The three products of a linear layer y = x w^T, with x [rows,in], w [out,in] and y [rows,out]:
//   forward  y  [rows,out]  a sum over `in`
//   dx       dx [rows,in]   a sum over `out`
//   dw       dw [out,in]    a sum over `rows`
enum class LinearPass { forward, dx, dw };

// cuBLASLt's codes cublasLtMatmulTile_t, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION and cublasLtClusterShape_t; `split` is the
// number of split-K parts. CUBLASLT_ALGO_CONFIG_ID is always kTunedAlgorithm.
struct TunedAlgorithm {
  uint32_t tile, schedule;
  uint16_t cluster;
  int32_t split;
  bool operator==(const TunedAlgorithm&) const = default;
};
inline constexpr int32_t kTunedAlgorithm = 66;

inline constexpr int64_t kTunedSms = 132;
inline constexpr uint16_t kClusterOfTwo = 3, kClusterOfTwoAcross = 5;  // 2x1x1 and 1x2x1

// The measured algorithm for products with these sizes and with min_rows to max_rows rows.
struct TunedProduct {
  LinearPass pass;
  int64_t in, out;
  int64_t min_rows, max_rows;
  TunedAlgorithm algorithm;
};
inline constexpr TunedProduct kTunedProducts[] = {
    {LinearPass::dw, 768, 768, 16384, INT64_MAX, {151, 0, kClusterOfTwoAcross, 4}},
    {LinearPass::dw, 768, 3072, 16384, INT64_MAX, {151, 2, kClusterOfTwoAcross, 1}},
    {LinearPass::dw, 3072, 768, 16384, INT64_MAX, {151, 2, kClusterOfTwoAcross, 1}},
    {LinearPass::forward, 768, 50304, 1024, 4096, {201, 2, kClusterOfTwoAcross, 1}},
    {LinearPass::dx, 768, 50304, 1024, 2048, {31, 6, kClusterOfTwoAcross, 2}},
    {LinearPass::dx, 768, 50304, 4096, 4096, {31, 6, kClusterOfTwoAcross, 1}},
};

// A CTA computes one tile of a product: `width` rows of the result and `height` of its columns (y [rows,out] has `out`
// columns, dx [rows,in] and dw [out,in] have `in`). `code` is cuBLASLt's cublasLtMatmulTile_t of this size.
struct MatmulTile {
  int64_t height, width;
  uint32_t code;
};
// Products forward and dx take the tile of this list with the least tile_waste(). kWideTile is the tile of dw.
inline constexpr MatmulTile kTiles[] = {{128, 176, 409}, {128, 168, 408}, {128, 160, 29},
                                        {128, 152, 407}, {128, 144, 406}, {128, 136, 405}};
inline constexpr MatmulTile kWideTile = {128, 256, 23};

// The SMs compute a product in waves, one tile per SM at a time, and all tiles of a wave take equally long. tile_waste
// is the time of these waves divided by the time that the product would take if no tile reached over an edge of the
// result and the last wave had a tile for each SM. 1 is the least; the result has `rows` x `columns` elements.
inline double tile_waste(const MatmulTile& tile, int64_t columns, int64_t rows) {
  const auto parts = [](int64_t total, int64_t part) { return (total + part - 1) / part; };
  const int64_t waves = parts(parts(columns, tile.height) * parts(rows, tile.width), kTunedSms);
  return static_cast<double>(waves * kTunedSms * tile.height * tile.width) / static_cast<double>(columns * rows);
}

// The algorithm for a product, or nothing where cuBLASLt's heuristic shall choose.
inline std::optional<TunedAlgorithm> tuned_algorithm(LinearPass pass, int64_t in, int64_t out, int64_t rows) {
  for (const TunedProduct& t : kTunedProducts)
    if (t.pass == pass && t.in == in && t.out == out && t.min_rows <= rows && rows <= t.max_rows) return t.algorithm;

  constexpr double kMostWaste = 1.04;    // beyond it, a tile of another height may be faster
  constexpr int64_t kFewestRows = 1024;  // products of fewer rows were not measured
  constexpr int64_t kChunkRows = 4096;   // rows of a chunk of the classifier, for which alone dw has a rule
  if (pass == LinearPass::dw) {
    if (rows != kChunkRows || tile_waste(kWideTile, in, out) > kMostWaste) return {};
    return TunedAlgorithm{kWideTile.code, 4, kClusterOfTwo, 1};
  }
  if (rows < kFewestRows) return {};
  const int64_t columns = pass == LinearPass::forward ? out : in;
  const MatmulTile& best = *std::min_element(std::begin(kTiles), std::end(kTiles), [&](const auto& a, const auto& b) {
    return tile_waste(a, columns, rows) < tile_waste(b, columns, rows);
  });
  if (tile_waste(best, columns, rows) > kMostWaste) return {};
  return TunedAlgorithm{best.code, 1, kClusterOfTwo, 1};
}

}  // namespace triad::cuda
