// Every parameter's squared gradient norm, in one call. A part is one parameter's range in the gradient buffer; it is
// cut into pieces with at most kSumPiece elements. Sums are in double and in a fixed order: within a piece, then over a
// part's pieces.
#pragma once
#include "engine/context.h"

namespace triad {

// Columns of `norms`; each part has a row.
struct ParamNorms {
  enum : int64_t {
    squares,     // sum of x^2; not finite if an element is not
    not_finite,  // elements that are not finite
    count
  };
};

// norms [parts, ParamNorms::count] f64 overwritten  <-  x [n], any float dtype; pieces [p,2] i64: each piece's first
// element and element count; first_piece [parts + 1] i64: part i has the pieces [first_piece[i], first_piece[i + 1]).
void per_param_norms(Context&, Tensor norms, ConstTensor x, ConstTensor pieces, ConstTensor first_piece);

namespace cuda {
void per_param_norms(Context&, Tensor norms, ConstTensor x, ConstTensor pieces, ConstTensor first_piece);
}  // namespace cuda
}  // namespace triad
