// Cross-entropy of a row of logits: loss = logsumexp(logits) - logits[target], and 0 if the target is -1. Columns from
// `vocab` on are padding: no probability, no gradient.
#pragma once
#include "engine/context.h"

namespace triad {

// loss, lse [N] acc overwritten  <-  logits [N,Vp] T, targets [N] i32 in [-1, vocab). Finite for logits up to +-1e4.
void cross_entropy_forward(Context&, Tensor loss, Tensor lse, ConstTensor logits, ConstTensor targets, int64_t vocab);
// dlogits [N,Vp] T overwritten, may be logits itself: scale * (softmax - onehot), 0 in padding columns and in rows
// without a target  <-  logits, lse, targets as in forward.
void cross_entropy_backward(Context&, Tensor dlogits, ConstTensor logits, ConstTensor lse, ConstTensor targets,
                            int64_t vocab, double scale);
// Forward and backward together, for training, reading each logit once: loss [N] acc, dlogits [N,Vp] T overwritten
// (dlogits may be logits itself)  <-  logits, targets as in forward.
void cross_entropy_forward_backward(Context&, Tensor loss, Tensor dlogits, ConstTensor logits, ConstTensor targets,
                                    int64_t vocab, double scale);

namespace cuda {
void cross_entropy_forward(Context&, Tensor loss, Tensor lse, ConstTensor logits, ConstTensor targets, int64_t vocab);
void cross_entropy_backward(Context&, Tensor dlogits, ConstTensor logits, ConstTensor lse, ConstTensor targets,
                            int64_t vocab, double scale);
void cross_entropy_forward_backward(Context&, Tensor loss, Tensor dlogits, ConstTensor logits, ConstTensor targets,
                                    int64_t vocab, double scale);
}  // namespace cuda
}  // namespace triad
