// Table of cuBLASLt algorithms for the linear layers of model M7C, where a measured one is faster than the first one of
// cuBLASLt's heuristic. A table rather than autotuning at startup, so that a problem has the same algorithm, and so the
// same bits, in every run. Its rows were found by timing all of cuBLASLt's tiles, schedules, clusters and splits on an
// H200 (tests/baselines/notes/ops.md). On another card, or if the library no longer accepts an algorithm, the
// heuristic's first one is used.
#pragma once
#include <cstdint>

namespace triad::cuda {

// The three products of a linear layer y = x w^T, w [out,in], over `rows` rows.
enum class LinearPass { forward, dx, dw };

// The algorithm for products of a linear layer with these sizes and with min_rows to max_rows rows.
struct TunedProduct {
  LinearPass pass;
  int64_t in, out;
  int64_t min_rows, max_rows;
  // cuBLASLt's codes cublasLtMatmulTile_t, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION and cublasLtClusterShape_t; number of
  // split-K parts.
  uint32_t tile, schedule;
  uint16_t cluster;
  int32_t split;
};

inline constexpr int32_t kTunedAlgorithm = 66;  // CUBLASLT_ALGO_CONFIG_ID of all rows
inline constexpr int64_t kManyRows = 16384, kAnyRows = int64_t{1} << 40;
inline constexpr TunedProduct kTunedProducts[] = {
    {LinearPass::forward, 768, 1536, kManyRows, kAnyRows, 409, 1, 3, 1},
    {LinearPass::forward, 768, 768, kManyRows, kAnyRows, 29, 1, 3, 1},
    {LinearPass::forward, 768, 3072, kManyRows, kAnyRows, 29, 1, 3, 1},
    {LinearPass::forward, 3072, 768, kManyRows, kAnyRows, 407, 3, 5, 1},
    {LinearPass::dx, 768, 1536, kManyRows, kAnyRows, 405, 3, 5, 1},
    {LinearPass::dx, 768, 768, kManyRows, kAnyRows, 408, 3, 5, 1},
    {LinearPass::dx, 3072, 768, kManyRows, kAnyRows, 409, 1, 3, 1},
    {LinearPass::dw, 768, 768, kManyRows, kAnyRows, 151, 0, 5, 4},
    {LinearPass::dw, 768, 3072, kManyRows, kAnyRows, 151, 2, 5, 1},
    {LinearPass::dw, 3072, 768, kManyRows, kAnyRows, 151, 2, 5, 1},
    {LinearPass::forward, 768, 50304, 1024, 4096, 201, 2, 5, 1},
    {LinearPass::dx, 768, 50304, 1024, 2048, 31, 6, 5, 2},
    {LinearPass::dx, 768, 50304, 4096, 4096, 31, 6, 5, 1},
    {LinearPass::dw, 768, 50304, 1024, 4096, 20, 3, 5, 1},
};

}  // namespace triad::cuda
