// Cross-entropy for a row of logits: loss = logsumexp(logits) - logits[target], and 0 if the target is -1. Columns from
// `vocab` on are padding: no probability, no gradient.
#pragma once
#include "engine/context.h"

namespace triad {

// The gradient that reaches each row's loss: a number, or a [1] f64 tensor on the op's device, whose content may change
// between launches of a recorded graph.
class LossScale {
 public:
  LossScale(double number) : number_(number) {}
  LossScale(const ConstTensor& number) : at_(number.ptr<double>()) {}
  constexpr double value() const { return at_ != nullptr ? *at_ : number_; }  // call it on the op's device

 private:
  double number_ = 1;
  const double* at_ = nullptr;
};

// loss, lse [N] acc overwritten  <-  logits [N,Vp] T, targets [N] i32 in [-1, vocab). Finite for logits up to +-1e4.
void cross_entropy_forward(Context&, Tensor loss, Tensor lse, ConstTensor logits, ConstTensor targets, int64_t vocab);
// dlogits [N,Vp] T overwritten with scale * (softmax - onehot), and with 0 in padding columns and in rows without a
// target; may be logits itself  <-  logits, lse, targets as in forward.
void cross_entropy_backward(Context&, Tensor dlogits, ConstTensor logits, ConstTensor lse, ConstTensor targets,
                            int64_t vocab, LossScale scale);
// Forward and backward in one call, for training; the GPU reads each logit once. loss [N] acc, dlogits [N,Vp] T
// overwritten (dlogits may be logits itself)  <-  logits, targets as in forward.
void cross_entropy_forward_backward(Context&, Tensor loss, Tensor dlogits, ConstTensor logits, ConstTensor targets,
                                    int64_t vocab, LossScale scale);

namespace cuda {
void cross_entropy_forward(Context&, Tensor loss, Tensor lse, ConstTensor logits, ConstTensor targets, int64_t vocab);
void cross_entropy_backward(Context&, Tensor dlogits, ConstTensor logits, ConstTensor lse, ConstTensor targets,
                            int64_t vocab, LossScale scale);
void cross_entropy_forward_backward(Context&, Tensor loss, Tensor dlogits, ConstTensor logits, ConstTensor targets,
                                    int64_t vocab, LossScale scale);
// The same for rows that only a CTA cluster can hold. Returns false and does nothing if the card, the shape or the
// alignment is not supported.
bool cross_entropy_forward_backward_sm90(Context&, const Tensor& loss, const Tensor& dlogits, const ConstTensor& logits,
                                         const ConstTensor& targets, int64_t vocab, LossScale scale);
}  // namespace cuda
}  // namespace triad
