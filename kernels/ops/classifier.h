// The vocabulary head and its loss, computed for a chunk of rows at a time, so that only one chunk of logits exists at
// a time: loss[i] = cross_entropy(h[i] w^T, targets[i]). Built from matmul and cross_entropy.
#pragma once
#include "engine/context.h"
#include "kernels/ops/cross_entropy.h"

namespace triad {

struct ClassifierOptions {
  int64_t vocab = 0;  // valid rows of w; the rows after them are padding
  // Rows of logits that exist at a time. 4,096 rows with 50,304 logits are 412 MB in bf16. On an H200 both smaller and
  // larger chunks were slower.
  int64_t chunk_rows = 4096;
  bool add_dw = true;  // false: dw is overwritten instead of added to
};

// loss [N] acc overwritten  <-  h [N,C] T, w [Vp,C] T, targets [N] i32 in [-1, vocab)
void classifier_forward(Context&, Tensor loss, ConstTensor h, ConstTensor w, ConstTensor targets,
                        const ClassifierOptions&);
// Computes the loss and its gradients in one pass over the logits, for the upstream gradient d(loss[i]) = scale. loss
// [N] acc, dh [N,C] T overwritten; dw [Vp,C] acc added to (or overwritten, see add_dw; not computed if
// absent)  <-  h, w, targets as in forward. dh may be h itself.
void classifier_forward_backward(Context&, Tensor loss, Tensor dh, Tensor dw, ConstTensor h, ConstTensor w,
                                 ConstTensor targets, LossScale scale, const ClassifierOptions&);

}  // namespace triad
