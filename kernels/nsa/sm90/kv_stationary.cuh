// The selected branch's forward on Hopper for long sequences whose neighbouring tokens list different blocks: from the
// side of the blocks (nsa/sm90/kv_stationary.cu).
#pragma once
#include <functional>

#include "kernels/nsa/attend.h"
#include "kernels/nsa/gate.h"

namespace triad::cuda {

// Whether that route can be taken and may pay: a pure function of card and problem. Whether it does pay the card finds
// out from the lists; where neighbours list the same blocks another route is given all of them.
bool attend_blocks_sm90_applies(const Context&, const AttendOut&, const AttendIn&, const ConstTensor& block_index,
                                int64_t l_sel);
// attend_all(on, unless) has to compute o and lse by that route unless the GPU finds *unless to be other than 0.
void attend_blocks_forward_sm90(Context&, const char* op, const AttendOut&, const AttendIn&,
                                const ConstTensor& block_index, int64_t l_sel,
                                const std::function<void(Context& on, const int* unless)>& attend_all,
                                const CombineAlong* combine);

}  // namespace triad::cuda
