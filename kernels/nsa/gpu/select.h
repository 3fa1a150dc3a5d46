// The portable selection (nsa/gpu/select.cu): any card, f32 and bf16. Arguments as nsa_select's (nsa/select.h).
#pragma once
#include "kernels/nsa/select.h"

namespace triad::cuda {

inline constexpr int64_t kMaxSelectLength = int64_t{1}
                                            << 30;  // tokens, l, d and l' are below: 32-bit integers on the GPU

void select_portable(Context&, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                     const SelectOptions&);

}  // namespace triad::cuda
