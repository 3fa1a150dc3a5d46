// Optimizer: AdamW over a model's flat parameter buffer, or over the parts of it that this rank owns. Each part takes
// one launch for the tensors with weight decay and one for those without.
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
  // reducer: given with dist.zero 1: keeps the moments of this rank's shards of its buckets; null: of all parameters.
  Optimizer(Context&, Arena&, const Params&, GradReducer* reducer = nullptr);

  // Queues the update with params.grads(), clipped to c.grad_clip by the global norm whose square is in
  // grad_norm_squared [1] f64. step: optimizer steps before this one, skipped ones included. With shards, the
  // all-gather of each updated part is queued at once, in the order in which the next forward reads the weights.
  void step(Context&, Params&, ConstTensor grad_norm_squared, const TrainConfig&, int64_t step);
  // Makes a forward wait for the gathered weights layer by layer; null without shards.
  WeightGather* weights() { return gather_ ? &*gather_ : nullptr; }

  // With shards, each rank has only its own part of the master weights up to date: all-gathers them. Collective.
  void gather_master(Params&);
  // Both moments, fp32 [stored elements], laid out as the flat parameter buffer: on the device, or with shards gathered
  // on the host (in the vectors). Collective.
  struct Moments {
    Tensor exp_avg, exp_avg_sq;
    std::vector<float> host_avg, host_avg_sq;
  };
  Moments gather_moments(Context&, const Params&);
  // A range of parameters whose moments this rank keeps, and where they are in exp_avg() and exp_avg_sq().
  struct Part {
    ElementRange elements;  // of the flat parameter buffer
    int64_t moments = 0;    // first element in exp_avg() and exp_avg_sq()
    const GradBucket* bucket = nullptr;
  };
  const std::vector<Part>& parts() const { return parts_; }
  ConstTensor exp_avg() const { return exp_avg_; }
  ConstTensor exp_avg_sq() const { return exp_avg_sq_; }
  // Sets the moments from host buffers [stored elements] laid out as the flat parameter buffer.
  void set(Context&, const std::vector<float>& exp_avg, const std::vector<float>& exp_avg_sq);

 private:
  std::vector<float> gather(Context&, const Tensor& moment, int64_t whole_elements);

  GradReducer* reducer_;
  std::optional<WeightGather> gather_;
  std::vector<Part> parts_;
  Tensor exp_avg_, exp_avg_sq_;
};

}  // namespace triad
