// nsa_select's portable GPU implementation (nsa/gpu/select.cu): any card, f32 and bf16. The arguments are nsa_select's
// (nsa/select.h).
#pragma once
#include "kernels/nsa/select.h"

namespace triad::cuda {

// T, l, d and l' have to be less than this, because the GPU computes with 32-bit integers.
inline constexpr int64_t kMaxSelectLength = int64_t{1} << 30;

void select_portable(Context&, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                     const SelectOptions&, const Documents&);

}  // namespace triad::cuda
