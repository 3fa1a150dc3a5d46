// These functions compute dq's rounding unit on the GPU, for bf16 heads (64, 64) and (128, 128). The contract is in
// nsa/attend.h: attend_key_norms and attend_rounding_unit. nsa/dispatch/choose.cu decides which calls have a unit.
#pragma once
#include <vector>

#include "kernels/nsa/attend.h"

namespace triad::cuda {

inline constexpr int kMostBranches = 3;
void compute_key_norms(Context&, Tensor norms, int64_t tokens, int64_t head_width,
                       const std::vector<RoundingUnitBranch>&, const Documents&);
Tensor compute_rounding_unit(Context&, Scratch::Scope&, ConstTensor dout, ConstTensor q,
                             const std::vector<RoundingUnitBranch>&, ConstTensor dout_norm, ConstTensor key_norms,
                             const Documents&);

}  // namespace triad::cuda
