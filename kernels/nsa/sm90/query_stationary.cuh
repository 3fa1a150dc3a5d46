// The selected branch's forward on Hopper seen from the tokens: for groups of many heads, and for all groups where
// there are many blocks (nsa/sm90/query_stationary.cu).
#pragma once
#include "kernels/nsa/attend.h"
#include "kernels/nsa/gate.h"

namespace triad::cuda {

// Whether that route can be taken, and whether it is then faster than union tiles and the blocks' side: pure functions
// of card and problem.
bool attend_tokens_sm90_applies(const Context&, const AttendOut&, const AttendIn&, const ConstTensor& block_index,
                                int64_t l_sel);
bool attend_tokens_sm90_pays(const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
// Does nothing where the GPU finds *unless to be other than 0.
void attend_tokens_forward_sm90(Context&, const char* op, const AttendOut&, const AttendIn&,
                                const ConstTensor& block_index, int64_t l_sel, const CombineAlong* combine,
                                const int* unless = nullptr);

}  // namespace triad::cuda
