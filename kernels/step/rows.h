// Copies and adds strided tensors: this moves keys, values and their gradients, and adds them up, between ranks that
// share a sequence (model/sequence/group.h).
#pragma once
#include <span>

#include "engine/context.h"

namespace triad {

// Two tensors with the same shape, rank 2 to 4 and innermost stride 1. All pairs in a call share one y dtype and one x
// dtype, and may be computed at the same time: no y overlaps another tensor.
struct RowPair {
  Tensor y;
  ConstTensor x;
};
// y overwritten  <-  x: any two float dtypes (f64 on the CPU only). Rounded to nearest even.
void copy_rows(Context&, std::span<const RowPair>);
// y += x, in their common dtype: f32, or f64 on the CPU.
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
