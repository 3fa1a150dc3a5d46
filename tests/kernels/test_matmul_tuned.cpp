// How product sizes choose cuBLASLt's algorithm. The products themselves are tested in test_offsets.cpp.
#include "kernels/ops/classifier.h"
#include "kernels/ops/matmul_tuned.h"
#include "tests/support/test.h"

using namespace triad;
using cuda::LinearPass, cuda::TunedAlgorithm, cuda::tuned_algorithm;

TEST_CASE("A product takes the tile that wastes least", "[matmul]") {
  const int64_t tiles_of_rows = 33, columns = 4 * 128;  // 33 x 4 tiles: one for each SM
  for (const cuda::MatmulTile& tile : cuda::kTiles) {
    INFO(tile.rows << " rows per tile");
    const int64_t rows = tiles_of_rows * tile.rows;
    CHECK(cuda::tile_waste(tile, columns, rows) == 1.0);
    CHECK(cuda::tile_waste(tile, columns, rows + 1) > 1.99);  // 136 tiles: 132, then four
    CHECK(cuda::tile_waste(tile, 3 * 128, rows) > 1.33);      // a cluster has two tiles along the columns
    const TunedAlgorithm want{tile.code, 1, cuda::kTwoAlongColumns, 1};
    CHECK(tuned_algorithm(LinearPass::forward, 768, columns, rows) == want);
    CHECK(tuned_algorithm(LinearPass::dx, columns, 768, rows) == want);
  }
}

TEST_CASE("cuBLASLt's heuristic chooses where no algorithm is known to be faster", "[matmul]") {
  CHECK(tuned_algorithm(LinearPass::forward, 768, 512, 33 * 136));
  CHECK_FALSE(tuned_algorithm(LinearPass::forward, 768, 512, 33 * 136 + 1));  // the least waste is 1.06
  CHECK_FALSE(tuned_algorithm(LinearPass::forward, 767, 512, 33 * 136));      // a short sum
  CHECK_FALSE(tuned_algorithm(LinearPass::dx, 512, 767, 33 * 136));
  CHECK(tuned_algorithm(LinearPass::forward, 768, 12 * 128, 11 * 152));
  CHECK_FALSE(tuned_algorithm(LinearPass::forward, 768, 22 * 128, 6 * 152));  // 132 tiles, but few rows each
  CHECK_FALSE(tuned_algorithm(LinearPass::forward, 768, 0, 4096));
  REQUIRE(ClassifierOptions{}.chunk_rows == cuda::kClassifierRows);
  CHECK(tuned_algorithm(LinearPass::dw, 2048, 128256, 4096));
  CHECK_FALSE(tuned_algorithm(LinearPass::dw, 2048, 128256, 4095));  // the classifier takes 4,096 rows at a time
  CHECK_FALSE(tuned_algorithm(LinearPass::dw, 14336, 4096, 4096));   // 4,096 outputs are no vocabulary
  // Table rows and their limits.
  CHECK(tuned_algorithm(LinearPass::dw, 768, 768, 16384).value().split == 4);
  CHECK_FALSE(tuned_algorithm(LinearPass::dw, 768, 768, 16383));
  CHECK(tuned_algorithm(LinearPass::dx, 768, 50304, 2048).value().split == 2);
  CHECK_FALSE(tuned_algorithm(LinearPass::dx, 768, 50304, 2049));
}
