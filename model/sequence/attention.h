// The attention of a layer whose sequences several ranks share (dist.context). Each rank has the queries, keys and
// values of its tokens. Forward gathers the keys and values that these queries see from the other ranks: for the window
// those of the w - 1 tokens before, for the selected branch and dense attention all earlier ones. Each compressed block
// is made by the rank that has the block's first token, and then gathered. Backward gathers again, since no rank keeps
// what it gathered, and returns the gradients of gathered keys and values to the ranks that own them, which add them in
// the order of ranks.
#pragma once
#include "model/attention.h"

namespace triad {

// As nsa_forward() and dense_attention_forward(). in: this rank's tokens; in.k[0] and v[0] of the compressed branch are
// not yet compressed.
void context_nsa_forward(Context&, const LayerContext&, Tensor out, const NsaSaved&, const QkvViews& in,
                         const NsaWeights&);
void context_dense_forward(Context&, const LayerContext&, const DenseSaved&, const QkvViews& in);
// As nsa_backward() and dense_attention_backward(). The gradients of k and v are those of this rank's tokens, over the
// queries of all ranks.
void context_nsa_backward(Context&, const LayerContext&, const NsaGrad&, const NsaWeightGrads& dw, ConstTensor dout,
                          const QkvViews& in, const NsaSaved&, const NsaWeights&);
void context_dense_backward(Context&, const LayerContext&, const DenseGrad&, ConstTensor dout, const QkvViews& in,
                            const DenseSaved&);

}  // namespace triad
