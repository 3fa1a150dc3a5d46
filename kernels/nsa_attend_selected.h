// NSA's selected branch: row t of group g sees the tokens s <= t of the blocks listed for (t, g).
#pragma once
#include "kernels/nsa_attend.h"

namespace triad {

// block_index [B,T,Hkv,n] i32: ascending, unique, -1 at the end; block j is the tokens [j*l_sel, (j+1)*l_sel).
// A constant of backward, which has to be given the list that forward used.
void nsa_attend_selected_forward(Context&, const AttendOut&, const AttendIn&, ConstTensor block_index, int64_t l_sel);
void nsa_attend_selected_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                                  ConstTensor block_index, int64_t l_sel);

namespace cuda {
void nsa_attend_selected_forward(Context&, const AttendOut&, const AttendIn&, ConstTensor block_index, int64_t l_sel);
void nsa_attend_selected_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                                  ConstTensor block_index, int64_t l_sel);
}  // namespace cuda
}  // namespace triad
