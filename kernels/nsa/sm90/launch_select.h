// Launches the selection on Hopper (nsa/sm90/select.cu). The arguments are nsa_select's (nsa/select.h).
#pragma once
#include "kernels/nsa/select.h"

namespace triad::cuda {

// Whether select_sm90 can take a call: a pure function of the problem.
bool select_sm90_supports(const ConstTensor& q, const ConstTensor& k_cmp, const SelectOptions&, const Documents&);
void select_sm90(Context&, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                 const SelectOptions&, const Documents&);

}  // namespace triad::cuda
