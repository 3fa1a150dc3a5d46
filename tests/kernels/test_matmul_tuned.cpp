// The choice of cuBLASLt's algorithm by the sizes of a product. The products themselves are tested in test_offsets.cpp.
#include "kernels/ops/matmul_tuned.h"
#include "tests/support/test.h"

using namespace triad;
using cuda::LinearPass, cuda::TunedAlgorithm, cuda::tuned_algorithm;

TEST_CASE("A product takes the tile that keeps the SMs busiest", "[matmul]") {
  const int64_t rows_of_132_tiles = 33, columns = 4 * 128;  // 4 x 33 tiles
  for (const cuda::MatmulTile& tile : cuda::kTiles) {
    INFO(tile.width << " rows per tile");
    const int64_t rows = rows_of_132_tiles * tile.width;
    CHECK(cuda::tile_waste(tile, columns, rows) == 1.0);
    CHECK(cuda::tile_waste(tile, columns, rows + 1) > 1.99);  // 136 tiles: 132, then four
    const TunedAlgorithm want{tile.code, 1, cuda::kClusterOfTwo, 1};
    CHECK(tuned_algorithm(LinearPass::forward, 64, columns, rows) == want);
    CHECK(tuned_algorithm(LinearPass::dx, columns, 64, rows) == want);
  }
}

TEST_CASE("cuBLASLt's heuristic chooses where no algorithm is known to be faster", "[matmul]") {
  CHECK_FALSE(tuned_algorithm(LinearPass::forward, 64, 512, 4488 + 1));      // the second wave has four tiles
  CHECK_FALSE(tuned_algorithm(LinearPass::forward, 64, 33 * 128, 4 * 152));  // 132 tiles, but of few rows
  CHECK(tuned_algorithm(LinearPass::forward, 64, 12 * 128, 11 * 152));
  CHECK_FALSE(tuned_algorithm(LinearPass::dw, 2048, 128256, 32768));  // a long sum
  CHECK(tuned_algorithm(LinearPass::dw, 2048, 128256, 4096));
  CHECK(tuned_algorithm(LinearPass::dw, 768, 768, 32768)->split == 4);  // a row of the table
}
