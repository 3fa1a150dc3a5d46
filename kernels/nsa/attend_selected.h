// NSA's selected branch: row t of group g sees the tokens s <= t of the blocks listed for (t, g).
#pragma once
#include "kernels/nsa/attend.h"
#include "kernels/nsa/gate.h"

namespace triad {

// block_index [B,T,Hkv,n] i32: ascending, unique, -1 at the end; block j is the tokens [j*l_sel, (j+1)*l_sel).
// A constant of backward, which has to be given the list that forward used.
// Blocks that a token has not reached may be listed, as nsa_select never does, and hold nothing for it.
// combine: what nsa_combine_forward would make of o and the other branches' o, which have to be there, is made along
// with o, and spares a pass over all of them. Only where ..._combines says so: a pure function of card and problem.
void nsa_attend_selected_forward(Context&, const AttendOut&, const AttendIn&, ConstTensor block_index, int64_t l_sel,
                                 const CombineAlong* combine = nullptr);
bool nsa_attend_selected_combines(const Context&, const AttendOut&, const AttendIn&, ConstTensor block_index,
                                  int64_t l_sel, const CombineAlong& combine);
void nsa_attend_selected_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                                  ConstTensor block_index, int64_t l_sel);

namespace cuda {
void nsa_attend_selected_forward(Context&, const AttendOut&, const AttendIn&, ConstTensor block_index, int64_t l_sel,
                                 const CombineAlong* combine);
bool nsa_attend_selected_combines(const Context&, const AttendOut&, const AttendIn&, ConstTensor block_index,
                                  int64_t l_sel, const CombineAlong& combine);
void nsa_attend_selected_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                                  ConstTensor block_index, int64_t l_sel);
}  // namespace cuda
}  // namespace triad
