// The selection on Hopper (nsa/sm90/select.cu): which calls it takes, and the call.
#pragma once
#include "kernels/nsa/select.h"

namespace triad::cuda {

// A pure function of card and problem.
bool select_sm90_applies(const Context&, const ConstTensor& q, const ConstTensor& k_cmp, const SelectOptions&);
void select_sm90(Context&, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                 const SelectOptions&);

}  // namespace triad::cuda
