// The selection on Hopper (nsa/sm90/select.cu). Arguments as nsa_select's (nsa/select.h).
#pragma once
#include "kernels/nsa/select.h"

namespace triad::cuda {

// A pure function of the problem.
bool select_sm90_supports(const ConstTensor& q, const ConstTensor& k_cmp, const SelectOptions&);
void select_sm90(Context&, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                 const SelectOptions&);

}  // namespace triad::cuda
