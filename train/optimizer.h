// Optimizer: AdamW over a model's flat parameter buffer, or over this rank's shards of it. Owns the state: the moments,
// and with shards the master weights. For each part it launches one kernel for the tensors with weight decay and one
// for those without.
#pragma once
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "engine/comm/comm.h"
#include "model/params.h"
#include "train/config.h"
#include "train/dist/weight_gather.h"

namespace triad {

class Optimizer {
 public:
  // reducer: given with shards, so that this rank keeps only the state of its shards of the reducer's buckets; null:
  // the state of all parameters.
  Optimizer(Context&, Arena&, Params&, const Config&, GradReducer* reducer = nullptr);

  // Queues the update with the gradients `sums`, of which grad_parts are this rank's, clipped to c.grad_clip by the
  // global norm, whose square is in grad_norm_squared [1] f64. step: number of optimizer steps before this one, skipped
  // ones included. With shards, each part's all-gather is queued directly after its update, in the order in which the
  // next forward reads the weights.
  void step(Context&, Tensor sums, const Parts& grad_parts, ConstTensor grad_norm_squared, const TrainConfig&,
            int64_t step);
  // The object that makes passes wait for the gathered weights layer by layer; null without shards.
  WeightGather* weights() { return gather_ ? &*gather_ : nullptr; }

  // The values that the optimizer keeps for each parameter.
  enum class State { parameter, exp_avg, exp_avg_sq };
  static constexpr State kStates[] = {State::parameter, State::exp_avg, State::exp_avg_sq};
  // Calls f(elements, values) for ranges that together are the flat buffer; values [elements] f32 on the device are
  // valid until f queues no more reads on ctx.stream. With shards these are buckets, gathered from all ranks, who all
  // call it.
  using WithValues = std::function<void(const ElementRange&, const Tensor& values)>;
  void gather(Context&, State, const WithValues& f);
  // Calls f(elements, values) for each range of the flat buffer whose state this rank keeps; f may write the values.
  // Call publish() after writing parameters.
  void for_each_own(State, const WithValues& f);
  // Sets values of elements from `begin` on, all of which this rank keeps. Call publish() after the last parameters.
  void set(Context&, State, int64_t begin, std::span<const float> values);
  // Makes the weights that the model computes with those of the parameters. Collective with shards.
  void publish(Context&);
  // Initializes the parameters, and the weights, from a seed (Params::init).
  void init(Context&, uint64_t seed);

  const Parts& parts() const { return parts_; }
  ConstTensor exp_avg() const { return exp_avg_; }
  ConstTensor exp_avg_sq() const { return exp_avg_sq_; }

 private:
  Tensor kept(State, const Parts::Part&, const ElementRange&) const;

  Params& params_;
  GradReducer* reducer_;
  Parts parts_;
  // [parts().size()]. master_: with shards, unless the parameters are this rank's parts of the whole weights.
  Tensor master_, exp_avg_, exp_avg_sq_;
  std::optional<WeightGather> gather_;
};

}  // namespace triad
