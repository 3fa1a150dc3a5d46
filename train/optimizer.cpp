#include "train/optimizer.h"

#include "kernels/adamw.h"
#include "train/schedule.h"

namespace triad {

Optimizer::Optimizer(Context& ctx, Arena& arena, const Params& params) {
  const Shape shape = {params.stored_elements()};
  exp_avg_ = arena.alloc(MemTag::optimizer, "exp_avg", DType::f32, shape);
  exp_avg_sq_ = arena.alloc(MemTag::optimizer, "exp_avg_sq", DType::f32, shape);
  zero(ctx, exp_avg_);
  zero(ctx, exp_avg_sq_);
}

void Optimizer::step(Context& ctx, Params& params, ConstTensor grad_norm_squared, const TrainConfig& c, int64_t step) {
  AdamWOptions options{.lr = learning_rate(c, step),
                       .beta1 = c.beta1,
                       .beta2 = c.beta2,
                       .eps = c.eps,
                       .weight_decay = c.weight_decay,
                       .grad_clip = c.grad_clip,
                       .step = step + 1};
  auto update = [&](int64_t begin, int64_t end) {
    auto part = [&](const Tensor& whole) { return whole.slice(0, begin, end); };
    adamw(ctx, part(params.master()), params.has_master() ? part(params.weights()) : Tensor{}, part(exp_avg_),
          part(exp_avg_sq_), part(params.grads()), grad_norm_squared, options);
  };
  update(0, params.decay_end());
  options.weight_decay = 0;
  update(params.decay_end(), params.stored_elements());
}

}  // namespace triad
