// The portable GPU implementation of nsa_select_index (nsa/gpu/select_index.cu): any card, f32 and bf16. The arguments
// are those of nsa_select_index in nsa/select_index.h.
#pragma once
#include "kernels/nsa/select_index.h"

namespace triad::cuda {

void select_index_portable(Context&, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions&,
                           const Documents&);

}  // namespace triad::cuda
