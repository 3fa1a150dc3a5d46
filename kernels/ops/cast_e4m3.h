// e4m3 (1 sign, 4 exponent, 3 mantissa bits; no infinity) with a scale for each row, for products on fp8 tensor cores.
//
// A row's value is byte * scale. Its scale is the smallest power of two for which no value exceeds 448, the largest
// e4m3, so dividing by it is exact and only the rounding to e4m3 (to nearest, ties to even) loses anything. No scale
// is below 2^-124, so that every scaled value is a bf16 too; rows of values below 2^-115 lose bits for it. A row of
// zeros has this smallest scale, because it must not raise one that rows share (transpose_e4m3). A row that holds an
// infinity or a NaN is NaN, scale and bytes: a product shows it.
#pragma once
#include <algorithm>
#include <bit>

#include "engine/context.h"

namespace triad {

// A matrix in e4m3. q [N,K] u8, whose rows may be strided; scale [N] f32: a power of two, or NaN.
struct E4m3Rows {
  Tensor q, scale;
  bool empty() const { return q.empty(); }
};

// x [N,K] f32 or bf16 (on a GPU bf16), any row stride -> rows.q [N,K], rows.scale [N], overwritten.
void cast_rows_e4m3(Context&, const E4m3Rows& rows, ConstTensor x);
// The same for the transpose of w [M,K], contiguous, M and K multiples of 16: columns.q [K,M], columns.scale [K].
void cast_columns_e4m3(Context&, const E4m3Rows& columns, ConstTensor w);
// What a cast loses: how many values are counted, how many of them are 0 and how many NaN. A row's scale fits its
// largest value, so that none is above 448: NaN are the rows that hold an infinity or a NaN.
struct E4m3Counts {
  enum : int64_t { values, zeros, nans, count };
};
inline constexpr int64_t kE4m3CountedRows = 16;  // one row in so many is counted
// counts [E4m3Counts::count] f64, added to  <-  rows 0, 16, 32, ... of a matrix whose columns are a multiple of 16.
// Rows of zeros are left out, since their zeros are exact.
void count_e4m3(Context&, Tensor counts, const E4m3Rows& rows);
// Allocates a matrix [N,K] in a Scratch::Scope, or in memory with the same alloc().
template <class Memory>
E4m3Rows alloc_e4m3_rows(Memory& memory, int64_t N, int64_t K) {
  return {memory.alloc(DType::u8, {N, K}, "e4m3 rows"), memory.alloc(DType::f32, {N}, "scales of e4m3 rows")};
}

// A matrix [K,N] in e4m3, its columns padded by zeros to a multiple of kE4m3Multiple.
// q [K,ceil(N/16)*16] u8, contiguous; scale [1] f32: a power of two, or NaN.
struct E4m3Columns {
  Tensor q, scale;
};

// The transposes of two matrices in e4m3, for a product that sums over their rows: a weight gradient.
//
// Such a sum takes one scale for each operand, while each row has two of its own. Only their product matters to the
// sum, so rows are brought to the largest product of all rows: a row whose product is 2^-e of that is divided by
// 2^(e/2) in each operand, where it keeps its bits down to 2^-6, e4m3's smallest normal. So a row is lost only where
// neither operand's size matters to the sum, and a few large rows of x do not flush the others if their dy are small.
//
// a, b, overwritten  <-  a_rows [N,Ka], b_rows [N,Kb], Ka and Kb multiples of 16. If a row's scale is NaN, all scales
// and bytes are.
void transpose_e4m3(Context&, const E4m3Columns& a, const E4m3Columns& b, const E4m3Rows& a_rows,
                    const E4m3Rows& b_rows);
// The shape of the transpose of rows, padding included.
Shape e4m3_columns_shape(const E4m3Rows& rows);

inline constexpr uint8_t kE4m3Nan = 0x7f;
inline constexpr int kE4m3Multiple = 16;  // weight rows and columns that fp8 products take are multiples of this

// A row's scale as the bits of a float, from the bits of its largest |x|. Compiled for both CPU and GPU.
#ifdef __CUDACC__
#define TRIAD_HOST_DEVICE __host__ __device__
#else
#define TRIAD_HOST_DEVICE
#endif
TRIAD_HOST_DEVICE constexpr uint32_t e4m3_scale_bits(uint32_t largest) {
  constexpr uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
  if (largest >= kInfinity) return kNan;
  // 448 is 1.75 * 2^8. The sum carries into the exponent if the mantissa is above 1.75.
  constexpr uint32_t kAbove = 0x7fffffu - 0x600000u, kLeast = 3;
  const uint32_t exponent = (largest + kAbove) >> 23;
  return (exponent < kLeast + 8 ? kLeast : exponent - 8) << 23;
}
// The bits of 1 / scale, for a power of two.
TRIAD_HOST_DEVICE constexpr uint32_t e4m3_inverse_bits(uint32_t scale) {
  return scale >= 0x7f800000u ? scale : (254u << 23) - scale;
}
#undef TRIAD_HOST_DEVICE

// x rounded to e4m3; what exceeds 448 becomes 448, and a NaN stays one.
constexpr uint8_t to_e4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), size = bits & 0x7fffffffu;
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  if (size > 0x7f800000u) return kE4m3Nan;
  constexpr uint32_t kSmallestNormal = 121u << 23;  // 2^-6
  if (size < kSmallestNormal) {
    // Adding 2^14 leaves a float's last bit worth 2^-9, as that of an e4m3 below 2^-6, and rounds to it.
    constexpr float kShift = 16384.0f;
    const float shifted = std::bit_cast<float>(size) + kShift;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kShift)));
  }
  constexpr uint32_t kLargest = 0x7e, kRebias = (127u - 7u) << 3;
  const uint32_t rounded = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - kRebias;
  return static_cast<uint8_t>(sign | std::min(rounded, kLargest));
}
constexpr float from_e4m3(uint8_t byte) {
  const uint32_t sign = (byte & 0x80u) << 24, size = byte & 0x7fu;
  if (size == kE4m3Nan) return std::bit_cast<float>(0x7fc00000u | sign);
  if (size < 8) return (sign != 0 ? -1.0f : 1.0f) * static_cast<float>(size) * 0x1p-9f;
  return std::bit_cast<float>(sign | ((size + ((127u - 7u) << 3)) << 20));
}

namespace cuda {
void cast_rows_e4m3(Context&, const E4m3Rows& rows, const ConstTensor& x);
void cast_columns_e4m3(Context&, const E4m3Rows& columns, const ConstTensor& w);
void count_e4m3(Context&, const Tensor& counts, const E4m3Rows& rows);
void transpose_e4m3(Context&, const E4m3Columns& a, const E4m3Columns& b, const E4m3Rows& a_rows,
                    const E4m3Rows& b_rows);
}  // namespace cuda
}  // namespace triad
