// The transpose of e4m3 rows on the CPU, which the GPU's equals bit for bit.
#include "kernels/ops/transpose_e4m3.h"

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/integer.h"
#include "kernels/common/parallel.h"

namespace triad {

E4m3Columns alloc_e4m3_columns(Scratch::Scope& scope, const E4m3Rows& rows) {
  return {scope.alloc(DType::u8, {rows.q.size(1), round_up<int64_t>(rows.q.size(0), kE4m3Multiple)}, "e4m3 columns"),
          scope.alloc(DType::f32, {1}, "scale of e4m3 columns")};
}

void transpose_e4m3(Context& ctx, const E4m3Columns& columns, const E4m3Rows& rows) {
  const OpScope op_scope(ctx, "transpose_e4m3");
  TRIAD_CHECK(rows.q.rank == 2 && rows.q.size(1) % kE4m3Multiple == 0,
              "transpose_e4m3: {}: columns in a multiple of {} are needed", rows.q.str(), kE4m3Multiple);
  const int64_t N = rows.q.size(0), K = rows.q.size(1), padded = round_up<int64_t>(N, kE4m3Multiple);
  check_tensor("transpose_e4m3: rows", rows.q, {N, K}, DType::u8);
  check_tensor("transpose_e4m3: the rows' scales", rows.scale, {N}, DType::f32);
  check_tensor("transpose_e4m3: columns", columns.q, {K, padded}, DType::u8);
  check_tensor("transpose_e4m3: the columns' scale", columns.scale, {1}, DType::f32);
  if (N == 0 || K == 0) return;
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::transpose_e4m3(ctx, columns, rows);
  }
  if (ctx.planning) return;
  const float* const scales = rows.scale.ptr<float>();
  const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
  // Bits of positive floats compare as the floats do, and a NaN's are the largest.
  const float scale = *std::max_element(scales, scales + N, [&](float a, float b) { return bits(a) < bits(b); });
  *columns.scale.ptr<float>() = scale;
  parallel_for(ctx, K, [&](int64_t k) {
    const uint8_t* const from = rows.q.ptr<uint8_t>() + k;
    uint8_t* const to = columns.q.ptr<uint8_t>() + k * padded;
    for (int64_t n = 0; n < N; ++n) to[n] = to_e4m3(from_e4m3(from[n * K]) * (scales[n] / scale));
    std::fill(to + N, to + padded, uint8_t{0});
  });
}

}  // namespace triad
