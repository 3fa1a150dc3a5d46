// Attention with one softmax over the selected blocks of a taught index (model `nsa.branches: sel`): no gate, no other
// branch. Row (t, g) lists blocks by nsa_select_index and attends to their tokens <= t. Shapes, dtypes and softmax:
// nsa/attend.h, with S = T. With n_sel * l_sel >= T it is dense attention.
#pragma once
#include "kernels/nsa/dense_attention.h"
#include "kernels/nsa/select.h"

namespace triad {

// What forward saves for backward; o is also its result.
struct SelectedSaved {
  Tensor block_index;     // [B,T,Hkv,n] i32
  Tensor o, lse;          // [B,T,Hq,dv] T, [B,T,Hq] acc
  Tensor index_lse = {};  // [B,T,Hkv] acc; absent: the index is not taught
};

// Forward: overwrites saved. keep_block_index: saved.block_index is an input and the selection is skipped.
void selected_attention_forward(Context&, const SelectedSaved& saved, const AttendIn&, const IndexIn&,
                                const SelectOptions&, bool keep_block_index = false);
// Backward: overwrites grad  <-  dout [B,T,Hq,dv] T, the inputs and the saved results of forward. index: null if the
// index is not taught.
void selected_attention_backward(Context&, const DenseGrad& grad, ConstTensor dout, const AttendIn&,
                                 const SelectedSaved& saved, int64_t l_sel, const IndexBackward* index = nullptr);

}  // namespace triad
