// AdamW with decoupled weight decay, the same formula as torch.optim.AdamW:
//   g' = g * clip;  m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2
//   p = p (1 - lr * decay) - lr * (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)
// clip = min(1, grad_clip / (norm + 1e-6)) with the norm of the whole gradient; clip = 1 if grad_clip is 0.
#pragma once
#include "engine/context.h"

namespace triad {

struct AdamWOptions {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  double grad_clip = 0;
  int64_t step = 1;  // number of this optimizer step, from 1 on
};

// master, m, v [n] f32 updated; weights [n] bf16 overwritten with the rounded master (absent if master is itself the
// weight that the model computes with)  <-  grad [n] f32, grad_norm_squared [1] f64 in device memory. Changes nothing
// if grad_norm_squared is not finite. On the CPU the f32 tensors may all be f64.
void adamw(Context&, Tensor master, Tensor weights, Tensor m, Tensor v, ConstTensor grad, ConstTensor grad_norm_squared,
           const AdamWOptions&);

namespace cuda {
void adamw(Context&, Tensor master, Tensor weights, Tensor m, Tensor v, ConstTensor grad, ConstTensor grad_norm_squared,
           const AdamWOptions&);
}  // namespace cuda
}  // namespace triad
