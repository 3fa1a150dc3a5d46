// Attention with one softmax over selected blocks: the selection and the selected branch, and before its backward what
// attention with one softmax needs (dense_attention.h).
#include "kernels/nsa/selected_attention.h"

#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/select_index.h"

namespace triad {

void selected_attention_forward(Context& ctx, const SelectedSaved& saved, const AttendIn& in, const IndexIn& index,
                                const SelectOptions& o, bool keep_block_index) {
  if (!keep_block_index) nsa_select_index(ctx, saved.block_index, index.q, index.k, o, in.documents);
  const IndexForward taught{index, saved.index_lse};
  nsa_attend_selected_forward(ctx, {saved.o, saved.lse}, in, saved.block_index, o.l_sel, /*combine=*/nullptr,
                              saved.index_lse.empty() ? nullptr : &taught);
}

void selected_attention_backward(Context& ctx, const DenseGrad& grad, ConstTensor dout, const AttendIn& in,
                                 const SelectedSaved& saved, int64_t l_sel, const IndexBackward* index) {
  Scratch::Scope scope(ctx.scratch);
  const AttendGradIn upstream =
      one_softmax_upstream(ctx, scope, "selected_attention backward", grad, dout, in, {saved.o, saved.lse});
  nsa_attend_selected_backward(ctx, {grad.dq, grad.dk, grad.dv}, upstream, in, saved.block_index, l_sel, index);
}

}  // namespace triad
