// Copies and sums of strided tensors: what moves and adds up keys, values and their gradients between ranks that share
// a sequence (model/sequence/group.h).
#pragma once
#include <span>

#include "engine/context.h"

namespace triad {

// Two tensors of one shape, of rank 2 to 4 and innermost stride 1. All pairs of a call have one dtype of y and one of
// x, and may be computed at the same time: no y overlaps another tensor of the call.
struct RowPair {
  Tensor y;
  ConstTensor x;
};
// y overwritten  <-  x: any two float dtypes (f64 on the CPU only). Rounded to nearest even.
void copy_rows(Context&, std::span<const RowPair>);
// y += x, in the dtype of both: f32, or f64 on the CPU.
void add_rows(Context&, std::span<const RowPair>);

inline void copy_rows(Context& ctx, Tensor y, ConstTensor x) {
  const RowPair pair{y, x};
  copy_rows(ctx, {&pair, 1});
}
inline void add_rows(Context& ctx, Tensor y, ConstTensor x) {
  const RowPair pair{y, x};
  add_rows(ctx, {&pair, 1});
}

namespace cuda {
void copy_rows(Context&, std::span<const RowPair>);
void add_rows(Context&, std::span<const RowPair>);
}  // namespace cuda
}  // namespace triad
