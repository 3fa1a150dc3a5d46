// NSA's selected branch: row t in group g sees the tokens s <= t in the blocks listed for (t, g). Shapes, dtypes and
// softmax: nsa/attend.h, with S = T.
#pragma once
#include "kernels/nsa/attend.h"
#include "kernels/nsa/gate.h"
#include "kernels/nsa/index.h"

namespace triad {

// block_index [B,T,Hkv,n] i32: one list per token and group, ascending, unique, padded at the end with -1. Block j is
// the tokens [j*l_sel, (j+1)*l_sel); in packed rows entries are block ids (common/documents.h). Backward needs the
// lists that forward used. A listed block that begins after t adds no keys (nsa_select lists none).
// combine: the kernel's epilogue also computes the three branches' gated sum (nsa_combine_forward), which saves a pass
// over their outputs; the other branches' o and the gates must be complete. Allowed only if
// nsa_attend_selected_combines, a pure function of card and problem, returns true.
// index: what is computed for the index that this branch teaches (nsa/index.h); null: nothing.
void nsa_attend_selected_forward(Context&, const AttendOut&, const AttendIn&, ConstTensor block_index, int64_t l_sel,
                                 const CombineAlong* combine = nullptr, const IndexForward* index = nullptr);
bool nsa_attend_selected_combines(const Context&, const AttendOut&, const AttendIn&, ConstTensor block_index,
                                  int64_t l_sel, const CombineAlong& combine);
void nsa_attend_selected_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                                  ConstTensor block_index, int64_t l_sel, const IndexBackward* index = nullptr);

namespace cuda {
void nsa_attend_selected_forward(Context&, const AttendOut&, const AttendIn&, ConstTensor block_index, int64_t l_sel,
                                 const CombineAlong* combine);
bool nsa_attend_selected_combines(const Context&, const AttendOut&, const AttendIn&, ConstTensor block_index,
                                  int64_t l_sel, const CombineAlong& combine);
void nsa_attend_selected_backward(Context&, const AttendGradOut&, const AttendGradIn&, const AttendIn&,
                                  ConstTensor block_index, int64_t l_sel);
// In a build without CUDA, for a planning context: reserves what that backward needs.
void plan_selected_backward(Context&, const AttendIn&, const ConstTensor& block_index, int64_t l_sel);
}  // namespace cuda
}  // namespace triad
