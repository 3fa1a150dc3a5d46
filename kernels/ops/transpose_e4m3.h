// The transpose of a matrix in e4m3, with one scale: an operand of a weight gradient, whose sum runs over the rows.
//
// Scales are powers of two, so a byte changes only its exponent, and a value its bits only where it falls below 2^-6 of
// the common scale, e4m3's smallest normal. Rows whose largest value is 2^-18 of the matrix's become zeros.
#pragma once
#include "kernels/ops/cast_e4m3.h"

namespace triad {

// A matrix [K,N] in e4m3, its columns padded by zeros to a multiple of kE4m3Multiple.
// q [K,ceil(N/16)*16] u8, contiguous; scale [1] f32: a power of two, or NaN.
struct E4m3Columns {
  Tensor q, scale;
};

// columns, overwritten  <-  rows [N,K], K a multiple of 16. The scale is the largest of the rows', NaN if one is: then
// all bytes are NaN.
void transpose_e4m3(Context&, const E4m3Columns& columns, const E4m3Rows& rows);
// Allocates the transpose of rows in the scope.
E4m3Columns alloc_e4m3_columns(Scratch::Scope& scope, const E4m3Rows& rows);

namespace cuda {
void transpose_e4m3(Context&, const E4m3Columns& columns, const E4m3Rows& rows);
}  // namespace cuda
}  // namespace triad
