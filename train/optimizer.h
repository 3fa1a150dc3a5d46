// AdamW over a model's flat parameter buffer, or over the parts of it that this rank owns: for each part one launch for
// the tensors that decay and one for those that do not.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "engine/comm/comm.h"
#include "model/params.h"
#include "train/config.h"
#include "train/weight_gather.h"

namespace triad {

class Optimizer {
 public:
  // reducer: with dist.zero 1 moments are kept for what this rank owns of its buckets; absent: for everything.
  Optimizer(Context&, Arena&, const Params&, GradReducer* reducer = nullptr);

  // Applies params.grads(), clipped by the global norm whose square stands in grad_norm_squared [1] f64. step:
  // optimizer steps before this one, skipped ones included. Owned parts are given to all ranks as they are done, those
  // first that the next forward needs first.
  void step(Context&, Params&, ConstTensor grad_norm_squared, const TrainConfig&, int64_t step);
  // Which of them are still on their way; null without parts of its own.
  WeightGather* weights() { return gather_ ? &*gather_ : nullptr; }

  // With parts of its own a rank has the master copy of these alone up to date: makes it whole. All ranks have to ask.
  void gather_master(Params&);
  // Both moments, fp32, laid out as the parameters' whole buffers: where they are, or gathered on the host. All ranks
  // have to ask.
  struct Moments {
    Tensor exp_avg, exp_avg_sq;
    std::vector<float> host_avg, host_avg_sq;
  };
  Moments gather_moments(Context&, const Params&);
  // The moments that this rank keeps, as they are stored, and what part of the whole buffers each piece is of.
  struct Part {
    ElementRange elements;
    int64_t moments = 0;  // where its moments begin
    const GradBucket* bucket = nullptr;
  };
  const std::vector<Part>& parts() const { return parts_; }
  ConstTensor exp_avg() const { return exp_avg_; }
  ConstTensor exp_avg_sq() const { return exp_avg_sq_; }
  // Sets them from whole buffers of the host.
  void set(Context&, const std::vector<float>& exp_avg, const std::vector<float>& exp_avg_sq);

 private:
  std::vector<float> gather(Context&, const Tensor& moment, int64_t whole_elements);

  GradReducer* reducer_;
  std::optional<WeightGather> gather_;
  std::vector<Part> parts_;
  Tensor exp_avg_, exp_avg_sq_;
};

}  // namespace triad
