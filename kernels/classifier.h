// The vocabulary head and its loss, a chunk of rows at a time, so that all logits never exist together:
// loss[i] = cross_entropy(h[i] w^T, targets[i]). Composed of matmul and cross_entropy.
#pragma once
#include "engine/context.h"

namespace triad {

struct ClassifierOptions {
  int64_t vocab = 0;          // valid rows of w; the rest is padding
  int64_t chunk_rows = 2048;  // rows whose logits exist at a time
};

// loss [N] acc overwritten  <-  h [N,C] T, w [Vp,C] T, targets [N] i32 in [-1, vocab)
void classifier_forward(Context&, Tensor loss, ConstTensor h, ConstTensor w, ConstTensor targets,
                        const ClassifierOptions&);
// The same and its gradient in one pass over the logits, for upstream d(loss[i]) = scale:
// loss [N] acc, dh [N,C] T overwritten; dw [Vp,C] acc added to. dh may not be h.
void classifier_forward_backward(Context&, Tensor loss, Tensor dh, Tensor dw, ConstTensor h, ConstTensor w,
                                 ConstTensor targets, double scale, const ClassifierOptions&);

}  // namespace triad
