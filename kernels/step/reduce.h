// Sums over a whole tensor in a fixed order: partial sums of fixed pieces, then the pieces in order, in double.
#pragma once
#include "engine/context.h"

namespace triad {

// out [1] f64, overwritten or (add) added to  <-  x: contiguous, any float dtype
void sum(Context&, Tensor out, ConstTensor x, bool add = false);
void sum_of_squares(Context&, Tensor out, ConstTensor x, bool add = false);

// sum_of_squares in its two steps, where the pieces are shared out among ranks: the same bits. partials: one f64 for
// each kSumPiece elements of x.
inline constexpr int64_t kSumPiece = 1 << 14;
void square_pieces(Context&, Tensor partials, ConstTensor x);
void sum_pieces(Context&, Tensor out, ConstTensor partials);

namespace cuda {
void piece_sums(Context&, Tensor partials, ConstTensor x, bool squares);
void finish_sum(Context&, Tensor out, ConstTensor partials, bool add);
}  // namespace cuda
}  // namespace triad
