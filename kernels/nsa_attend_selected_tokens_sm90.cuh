// The selected branch's forward on Hopper seen from the tokens: for groups of many heads
// (nsa_attend_selected_tokens_sm90.cu).
#pragma once
#include "kernels/nsa_attend.h"
#include "kernels/nsa_gate.h"

namespace triad::cuda {

// Whether that route is taken: a pure function of card and problem.
bool attend_tokens_sm90_applies(const Context&, const AttendOut&, const AttendIn&, const ConstTensor& block_index,
                                int64_t l_sel);
void attend_tokens_forward_sm90(Context&, const char* op, const AttendOut&, const AttendIn&,
                                const ConstTensor& block_index, int64_t l_sel, const CombineAlong* combine);

}  // namespace triad::cuda
