// The sum of squares of each part of a buffer at once (the gradient of each parameter), in a fixed order: pieces of at
// most kSumPiece elements that keep to their part, then each part's pieces in order, in double.
#pragma once
#include "engine/context.h"

namespace triad {

// What is told of a part, each a double at its place in the row.
struct ParamNorms {
  enum : int64_t {
    squares,     // sum of x^2; not finite where an element is not
    not_finite,  // how many elements are not
    count
  };
};

// facts [parts, ParamNorms::count] f64 overwritten  <-  x [n] acc; pieces [p,2] i64: first element and number of
// elements of each; first_piece [parts + 1] i64: part i has the pieces [first_piece[i], first_piece[i + 1]).
void per_param_norms(Context&, Tensor facts, ConstTensor x, ConstTensor pieces, ConstTensor first_piece);

namespace cuda {
void per_param_norms(Context&, Tensor facts, ConstTensor x, ConstTensor pieces, ConstTensor first_piece);
}  // namespace cuda
}  // namespace triad
