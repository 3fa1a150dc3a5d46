// The selected branch's forward on Hopper seen from the tokens: for groups of many heads
// (nsa_attend_selected_tokens_sm90.cu).
#pragma once
#include <functional>

#include "kernels/nsa_attend.h"

namespace triad::cuda {

// Whether that route is taken: a pure function of card and problem.
bool attend_tokens_sm90_applies(const Context&, const AttendOut&, const AttendIn&, const ConstTensor& block_index,
                                int64_t l_sel);
// Where a group's heads do not fill its warps the card looks whether neighbours list the same blocks. If so, union
// tiles do it: attend_union(unless) has to compute o and lse, but do nothing when the card finds *unless != 0.
void attend_tokens_forward_sm90(Context&, const char* op, const AttendOut&, const AttendIn&,
                                const ConstTensor& block_index, int64_t l_sel,
                                const std::function<void(const int* unless)>& attend_union);

}  // namespace triad::cuda
