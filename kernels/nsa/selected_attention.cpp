// Attention with one softmax over selected blocks: the selection and the selected branch, and before its backward delta
// and rounding unit.
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
  const Tensor delta = scope.alloc(saved.lse.dtype, saved.lse.shape(), "delta"),
               norm = scope.alloc(saved.lse.dtype, saved.lse.shape(), "|dout|");
  attention_delta(ctx, delta, dout, saved.o, norm);
  zero(ctx, grad.dq);
  // As in dense attention: the tables of a part of a row count from its keys, not its queries.
  const Tensor unit = attend_rounding_unit(ctx, scope, grad.dq, dout, in.q, {{in.k, in.v, {}, delta}}, norm, {},
                                           in.documents.part.whole() ? in.documents : Documents{});
  nsa_attend_selected_backward(ctx, {grad.dq, grad.dk, grad.dv}, {dout, {}, delta, saved.lse, unit}, in,
                               saved.block_index, l_sel, index);
}

}  // namespace triad
