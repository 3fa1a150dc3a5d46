// AdamW with decoupled decay, as torch.optim.AdamW:
//   g' = g * clip;  m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2
//   p = p (1 - lr * decay) - lr * (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)
// clip = min(1, grad_clip / (norm + 1e-6)), norm the global gradient norm; grad_clip 0: no clipping.
#pragma once
#include "engine/context.h"

namespace triad {

struct AdamWOptions {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  double grad_clip = 0;
  int64_t step = 1;  // optimizer steps, this one included
};

// master, m, v [n] f32 updated; weights [n] bf16 overwritten with the rounded master (absent where master is the
// compute weight itself)  <-  grad [n] f32, grad_norm_squared [1] f64 on the device. If that is not finite nothing
// changes.
void adamw(Context&, Tensor master, Tensor weights, Tensor m, Tensor v, ConstTensor grad, ConstTensor grad_norm_squared,
           const AdamWOptions&);

namespace cuda {
void adamw(Context&, Tensor master, Tensor weights, Tensor m, Tensor v, ConstTensor grad, ConstTensor grad_norm_squared,
           const AdamWOptions&);
}  // namespace cuda
}  // namespace triad
