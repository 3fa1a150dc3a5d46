// The vocabulary head and its loss, a chunk of rows at a time, so that all logits never exist together:
// loss[i] = cross_entropy(h[i] w^T, targets[i]). Composed of matmul and cross_entropy.
#pragma once
#include "engine/context.h"

namespace triad {

struct ClassifierOptions {
  int64_t vocab = 0;  // valid rows of w; the rest is padding
  // Rows whose logits exist at a time. 4,096 of 50,304 logits are 412 MB in bf16; on an H200 their three products and
  // the loss take 713 us for each 2,048 rows, in chunks of 2,048 rows 742, of 5,632 and more longer again.
  int64_t chunk_rows = 4096;
  bool add_dw = true;  // false: dw holds nothing yet and is overwritten
};

// loss [N] acc overwritten  <-  h [N,C] T, w [Vp,C] T, targets [N] i32 in [-1, vocab)
void classifier_forward(Context&, Tensor loss, ConstTensor h, ConstTensor w, ConstTensor targets,
                        const ClassifierOptions&);
// The same and its gradient in one pass over the logits, for upstream d(loss[i]) = scale:
// loss [N] acc, dh [N,C] T overwritten; dw [Vp,C] acc added to (see add_dw). dh may not be h.
void classifier_forward_backward(Context&, Tensor loss, Tensor dh, Tensor dw, ConstTensor h, ConstTensor w,
                                 ConstTensor targets, double scale, const ClassifierOptions&);

}  // namespace triad
