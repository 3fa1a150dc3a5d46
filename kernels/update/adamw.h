// AdamW with decoupled weight decay, the same formula as in torch.optim.AdamW:
//   g' = g * clip;  m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2
//   p = p (1 - lr * decay) - lr * (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)
// clip = min(1, grad_clip / (norm + 1e-6)) with the whole gradient's norm; clip = 1 if grad_clip is 0.
//
// State in bf16 is computed in f32, p from m and v before these are rounded, and rounded stochastically
// (kernels/common/stochastic.h). Rounded to nearest it would often not change at all: where gradients shrink, a step
// changes v by at most a fraction 1 - b2, and p by about lr, and both can be less than half a unit in bf16's last
// place, which is 2^-9 to 2^-8 of a number.
#pragma once
#include "engine/context.h"
#include "kernels/update/split_master.h"

namespace triad {

struct AdamWOptions {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  double grad_clip = 0;
  int64_t step = 1;  // this optimizer step's number, from 1 on
  // For state in bf16: the run's seed, and the first element's index in the model's flat parameter buffer. Updating the
  // whole buffer, or its parts on any number of ranks, gives the same bits.
  uint64_t seed = 0;
  int64_t first_element = 0;
};

// One tensor's update in step `step` takes its random bits from random_stream(RandomUse::state_rounding, ...).
enum class AdamWTensor : uint64_t { param, m, v };
uint64_t adamw_stream(int64_t step, AdamWTensor);

// param, m, v [n] f32 or bf16, each in its own dtype, updated; weights [n] bf16 overwritten with param rounded to
// nearest (absent if param is itself the weight that the model computes with, as it is if it is bf16)  <-  grad [n] f32
// or bf16, grad_norm_squared [1] f64 in device memory. Changes nothing if grad_norm_squared is not finite. On the CPU
// the four may all be f64. With split masters (split_master.h) param is the remainder, and weights and ties are updated
// too: the masters and weights get the bits that they get with param in f32.
void adamw(Context&, Tensor param, Tensor weights, Tensor m, Tensor v, ConstTensor grad, ConstTensor grad_norm_squared,
           const AdamWOptions&, const TieBits& ties = {});

namespace cuda {
void adamw(Context&, Tensor param, Tensor weights, Tensor m, Tensor v, ConstTensor grad, ConstTensor grad_norm_squared,
           const AdamWOptions&, const TieBits& ties);
}  // namespace cuda
}  // namespace triad
