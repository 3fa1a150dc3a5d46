// Optimizer: AdamW over a model's flat parameter buffer, or over the parts of it that this rank owns. For each part it
// launches one kernel for the tensors with weight decay and one for those without.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "engine/comm/comm.h"
#include "model/params.h"
#include "train/config.h"
#include "train/dist/weight_gather.h"

namespace triad {

class Optimizer {
 public:
  // reducer: given with dist.zero 1, so that this rank keeps only the moments of its shards of the reducer's buckets;
  // null: the moments of all parameters.
  Optimizer(Context&, Arena&, const Params&, GradReducer* reducer = nullptr);

  // Queues the update with the gradients params.grads(), clipped to c.grad_clip by the global norm, whose square is in
  // grad_norm_squared [1] f64. step: number of optimizer steps before this one, skipped ones included. With shards,
  // each part's all-gather is queued directly after its update, in the order in which the next forward reads the
  // weights.
  void step(Context&, Params&, ConstTensor grad_norm_squared, const TrainConfig&, int64_t step);
  // The object that makes a forward wait for the gathered weights layer by layer; null without shards.
  WeightGather* weights() { return gather_ ? &*gather_ : nullptr; }

  // All-gathers the master weights: with shards, each rank has only its own part of them up to date. Collective: all
  // ranks call it.
  void gather_master(Params&);
  // Both AdamW moments, fp32 [stored elements], laid out as the flat parameter buffer: on the device, or with shards
  // gathered on the host (in the vectors). Collective: all ranks call moments().
  struct Moments {
    Tensor exp_avg, exp_avg_sq;
    std::vector<float> host_avg, host_avg_sq;
  };
  Moments gather_moments(Context&, const Params&);
  // A range of parameters whose moments this rank keeps, and where these moments are in exp_avg() and exp_avg_sq().
  struct Part {
    ElementRange elements;  // range in the flat parameter buffer
    int64_t moments = 0;    // index of the first moment in exp_avg() and exp_avg_sq()
    const GradBucket* bucket = nullptr;
  };
  const std::vector<Part>& parts() const { return parts_; }
  ConstTensor exp_avg() const { return exp_avg_; }
  ConstTensor exp_avg_sq() const { return exp_avg_sq_; }
  // Copies the moments from host buffers [stored elements] that are laid out as the flat parameter buffer.
  void set(Context&, const std::vector<float>& exp_avg, const std::vector<float>& exp_avg_sq);

 private:
  std::vector<float> gather(Context&, const Tensor& moment, int64_t whole_elements);

  GradReducer* reducer_;
  std::optional<WeightGather> gather_;
  std::vector<Part> parts_;
  Tensor exp_avg_, exp_avg_sq_;
};

}  // namespace triad
