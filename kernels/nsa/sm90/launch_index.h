// Launchers of the taught index's Hopper kernels, and whether they support a call.
#pragma once
#include "kernels/nsa/index.h"
#include "kernels/nsa/select_index.h"

namespace triad::cuda {

// The selection: widths of 16 to 128 that are multiples of 16, blocks of 64 or 128 tokens, up to 32 chosen blocks.
bool select_index_sm90_supports(const ConstTensor& iq, const ConstTensor& ik, const SelectOptions&);
void select_index_sm90(Context&, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions&,
                       const Documents&);

// The student's lse: the same widths; blocks of 64 or 128 tokens, or dense attention.
bool index_forward_sm90_supports(const IndexForward&, const ConstTensor& block_index, int64_t l_sel);
void index_forward_sm90(Context&, const IndexForward&, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);

// Loss and gradients: likewise, with heads of 64 or 128.
bool index_backward_sm90_supports(const IndexBackward&, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
void index_backward_sm90(Context&, const IndexBackward&, const AttendIn&, const ConstTensor& lse,
                         const ConstTensor& block_index, int64_t l_sel);

}  // namespace triad::cuda
