// Attention in a layer whose sequences several ranks share (dist.context). Each rank has its tokens' queries, keys and
// values. Forward gathers the keys and values that these queries see from other ranks: for the window branch the w - 1
// tokens before, for the selected branch and dense attention all earlier ones. Each compressed block is made by the
// rank that has the block's first token, and then gathered. Backward gathers again, since no rank keeps what it
// gathered, and returns the gathered keys' and values' gradients to the ranks that own them, which add them in rank
// order.
#pragma once
#include "model/attention.h"

namespace triad {

// Like nsa_forward() and dense_attention_forward(). in: this rank's tokens; in.k[0] and v[0], for the compressed
// branch, aren't compressed yet.
void context_nsa_forward(Context&, const LayerContext&, Tensor out, const NsaSaved&, const QkvViews& in,
                         const NsaWeights&);
void context_dense_forward(Context&, const LayerContext&, const DenseSaved&, const QkvViews& in);
// Like nsa_backward() and dense_attention_backward(). The k and v gradients are for this rank's tokens, over all ranks'
// queries.
void context_nsa_backward(Context&, const LayerContext&, const NsaGrad&, const NsaWeightGrads& dw, ConstTensor dout,
                          const QkvViews& in, const NsaSaved&, const NsaWeights&);
void context_dense_backward(Context&, const LayerContext&, const DenseGrad&, ConstTensor dout, const QkvViews& in,
                            const DenseSaved&);

}  // namespace triad
