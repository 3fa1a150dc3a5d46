// Sums over a whole tensor, in double and in a fixed order: first within each piece of kSumPiece elements, then over
// the pieces in order.
#pragma once
#include "engine/context.h"

namespace triad {

// out [1] f64, overwritten, or added to if `add`  <-  x: contiguous, any float dtype
void sum(Context&, Tensor out, ConstTensor x, bool add = false);
void sum_of_squares(Context&, Tensor out, ConstTensor x, bool add = false);

// sum_of_squares() as two separate calls, for sums whose pieces are spread over ranks; the result has the same bits.
// partials [pieces] f64: one for each kSumPiece elements of x.
inline constexpr int64_t kSumPiece = 1 << 14;
void square_pieces(Context&, Tensor partials, ConstTensor x);
void sum_pieces(Context&, Tensor out, ConstTensor partials, bool add = false);

namespace cuda {
void piece_sums(Context&, Tensor partials, ConstTensor x, bool squares);
void finish_sum(Context&, Tensor out, ConstTensor partials, bool add);
}  // namespace cuda
}  // namespace triad
