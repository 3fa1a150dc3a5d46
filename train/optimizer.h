// AdamW over a model's flat parameter buffer: one launch for the tensors that decay, one for those that do not.
#pragma once
#include "model/params.h"
#include "train/config.h"

namespace triad {

class Optimizer {
 public:
  Optimizer(Context&, Arena&, const Params&);

  // Applies params.grads(), clipped by the global norm whose square stands in grad_norm_squared [1] f64. step:
  // optimizer steps before this one, skipped ones included.
  void step(Context&, Params&, ConstTensor grad_norm_squared, const TrainConfig&, int64_t step);

  // Moments, fp32, laid out as the parameters' whole buffers.
  Tensor exp_avg() const { return exp_avg_; }
  Tensor exp_avg_sq() const { return exp_avg_sq_; }

 private:
  Tensor exp_avg_, exp_avg_sq_;
};

}  // namespace triad
