// Products for which cuBLASLt was measured to have a faster algorithm than the first that its heuristic names: M7C's,
// with 16,384 rows and more. It is data, not a timing at the start: the same problem has the same algorithm, and so the
// same bits, in every run. Found by timing all of cuBLASLt's tiles, schedules, clusters and splits on one H200
// (cuBLASLt 13.0, L2 flushed, 32,768 rows, the head's with 4,096), microseconds of the first, then of this one. Where
// the library does not know such an algorithm any more, or on another card, the heuristic's first is taken.
#pragma once
#include <cstdint>

namespace triad::cuda {

// Of a linear layer y = x w^T, w [out,in], over `rows` rows.
enum class LinearPass { forward, dx, dw };

struct TunedProduct {
  LinearPass pass;
  int64_t in, out;
  int64_t min_rows, max_rows;
  // cublasLtMatmulTile_t, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, cublasLtClusterShape_t, how often the sum is split.
  uint32_t tile, schedule;
  uint16_t cluster;
  int32_t split;
};

inline constexpr int32_t kTunedAlgorithm = 66;  // CUBLASLT_ALGO_CONFIG_ID of them all
inline constexpr int64_t kManyRows = 16384, kAnyRows = int64_t{1} << 40;
inline constexpr TunedProduct kTunedProducts[] = {
    {LinearPass::forward, 768, 1536, kManyRows, kAnyRows, 409, 1, 3, 1},  // 112 -> 98
    {LinearPass::forward, 768, 768, kManyRows, kAnyRows, 29, 1, 3, 1},    // 71 -> 69
    {LinearPass::forward, 768, 3072, kManyRows, kAnyRows, 29, 1, 3, 1},   // 213 -> 191
    {LinearPass::forward, 3072, 768, kManyRows, kAnyRows, 407, 3, 5, 1},  // 223 -> 205
    {LinearPass::dx, 768, 1536, kManyRows, kAnyRows, 405, 3, 5, 1},       // 106 -> 99
    {LinearPass::dx, 768, 768, kManyRows, kAnyRows, 408, 3, 5, 1},        // 59 -> 53
    {LinearPass::dx, 3072, 768, kManyRows, kAnyRows, 409, 1, 3, 1},       // 218 -> 203
    {LinearPass::dw, 768, 768, kManyRows, kAnyRows, 151, 0, 5, 4},        // 63 -> 60
    {LinearPass::dw, 768, 3072, kManyRows, kAnyRows, 151, 2, 5, 1},       // 218 -> 194
    {LinearPass::dw, 3072, 768, kManyRows, kAnyRows, 151, 2, 5, 1},       // 241 -> 194
    {LinearPass::forward, 768, 50304, 1024, 4096, 201, 2, 5, 1},          // 432 -> 396
    {LinearPass::dx, 768, 50304, 1024, 2048, 31, 6, 5, 2},                // 245 -> 201, of 2,048 rows
    {LinearPass::dx, 768, 50304, 4096, 4096, 31, 6, 5, 1},                // 477 -> 391
    {LinearPass::dw, 768, 50304, 1024, 4096, 20, 3, 5, 1},                // 499 -> 416
};

}  // namespace triad::cuda
