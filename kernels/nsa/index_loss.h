// The loss of a taught index by itself (formulas: nsa/index.h), for callers who need its value right after the branch's
// forward: a framework's autograd. The engine's backward of a branch computes the same along the way.
#pragma once
#include "kernels/nsa/index.h"

namespace triad {

// index.dq, index.dk overwritten, index.loss added to, as by the branch's backward; index.lse is absent, since the
// student's lse is computed here  <-  q and k of the branch (v is not read), lse [B,T,Hq] acc from its forward.
// block_index, l_sel: nsa/attend_selected.h; block_index is absent for dense attention.
void nsa_index_loss(Context&, IndexBackward index, const AttendIn&, ConstTensor lse, ConstTensor block_index,
                    int64_t l_sel);

namespace index_cpu {
// The CPU's part of nsa_index_loss, next to the branches' patterns: attend_selected.cpp and dense_attention.cpp.
void selected_loss(Context&, const IndexForward&, const IndexBackward&, const AttendIn&, ConstTensor lse,
                   ConstTensor block_index, int64_t l_sel);
void dense_loss(Context&, const IndexForward&, const IndexBackward&, const AttendIn&, ConstTensor lse);
}  // namespace index_cpu
}  // namespace triad
