// Optimizer: AdamW over a model's flat parameter buffer, or over this rank's shards of it. Owns the state: the moments,
// and with shards or runtime.offload the master weights. For each part it launches one kernel for tensors with weight
// decay and one for tensors without. With runtime.offload, parts pass through the device piece by piece
// (engine/host_state.h). With train.optimizer muon, the layers' matrices, which are contiguous, are updated by Muon
// (kernels/update/muon.h), which has no second moment. With train.master_dtype split, masters are stored as the weights
// and their remainders (kernels/update/split_master.h); all functions here take and return them whole.
#pragma once
#include <functional>
#include <iterator>
#include <optional>
#include <span>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/host_state.h"
#include "kernels/update/adamw.h"
#include "kernels/update/muon.h"
#include "kernels/update/split_master.h"
#include "model/params.h"
#include "train/config/config.h"
#include "train/dist/muon_shards.h"
#include "train/dist/weight_gather.h"

namespace triad {

// Whether Muon updates a parameter: with train.optimizer muon the matrices in the layers' linear layers, but not gate's
// and phi's, the embedding and the head.
inline bool is_updated_by_muon(const ParamSpec& spec, OptimizerKind kind) {
  return kind == OptimizerKind::muon && spec.is_layer_product();
}

// Squared norms, each [1] f64, by which gradients are clipped: a taught index's by its own, all others by theirs.
struct SquaredNorms {
  ConstTensor grad, index;
};

class Optimizer {
 public:
  // reducer: given with shards, so this rank keeps only the state for its shards of the reducer's buckets; null: all
  // parameters' state. ranks: divide Muon's iterations among them, with shards the reducer's; null: this rank is alone.
  Optimizer(Context&, Arena&, Params&, const Config&, GradReducer* reducer = nullptr, CommQueue* ranks = nullptr);

  // Queues the update with the gradients `sums` (this rank has grad_parts), clipped to c.grad_clip by the global norm,
  // whose square is in norms. step: optimizer steps before this one, skipped ones included. With
  // shards, each part's all-gather is queued directly after its update, in the order in which the next forward reads
  // the weights. dense: a dense step (train.stages), whose unused parameters keep their values and moments.
  void step(Context&, Tensor sums, const Parts& grad_parts, const SquaredNorms& norms, const TrainConfig&, int64_t step,
            bool dense = false);
  // The object that makes passes wait for the gathered weights layer by layer; null without shards.
  WeightGather* weights() { return gather_ ? &*gather_ : nullptr; }

  // The values that the optimizer keeps for each parameter.
  enum class State { parameter, exp_avg, exp_avg_sq };
  static constexpr State kStates[] = {State::parameter, State::exp_avg, State::exp_avg_sq};
  // A state's dtype in gather() and in for_each_own(): f32 or bf16.
  static DType dtype_of(State, const Config&);
  // Whether a state is kept for a parameter: Muon needs no second moments for what it updates.
  static bool keeps(State state, const ParamSpec& spec, OptimizerKind kind) {
    return state != State::exp_avg_sq || !is_updated_by_muon(spec, kind);
  }
  // Calls f(elements, values) for ranges that together are the flat buffer; values [elements] are valid for what f
  // queues on ctx.stream. With shards these are buckets, gathered from all ranks, who all call it. Where the state
  // isn't kept, values are undefined or left out.
  using WithValues = std::function<void(const ElementRange&, const Tensor& values)>;
  void gather(Context&, State, const WithValues& f);
  // Calls f(elements, values) for ranges that together are the flat buffer's part whose state this rank keeps; what f
  // queues on ctx.stream may write the values, on the device. Call publish() after writing parameters.
  void for_each_own(Context&, State, const WithValues& f);
  // Sets values of elements from `begin` on; this rank keeps them all. Call publish() after the last parameters.
  void set(Context&, State, int64_t begin, std::span<const float> values);
  // Derives the weights that the model computes with from the parameters. Collective with shards.
  void publish(Context&);
  // Initializes the parameters, and the weights, from a seed (Params::init).
  void init(Context&, uint64_t seed);

  const Parts& parts() const { return parts_; }
  // The elements whose state this rank keeps.
  const Parts& parts(State state) const { return state == State::exp_avg_sq ? square_parts_ : parts_; }
  OptimizerKind kind() const { return kind_; }
  DType moments_dtype() const { return kept_[static_cast<size_t>(State::exp_avg)].dtype; }

 private:
  static constexpr size_t kCount = std::size(kStates);
  // What an update changes: all parameters, or a dense step's.
  struct Update {
    std::vector<ElementRange> unused;  // the elements that it leaves as they are, ascending
    MuonPlan muon;
    Tensor muon_pieces;  // the plan's table; empty with shards
    std::optional<MuonShards> muon_shards;
  };
  void prepare(Context&, Arena&, Update&, bool dense);
  void update_matrices(Context&, Update&, Tensor sums, const Parts& grad_parts, ConstTensor grad_norm_squared,
                       const AdamWOptions&);
  // What the elements of a range have in common for AdamW.
  struct Group {
    bool decays = false, index = false;  // with weight decay; parameters of a taught index
  };
  // Calls f(range, group) for a part's elements that AdamW updates.
  template <class F>
  void for_each_of_adamw(const Update&, const ElementRange& part, F&& f) const;
  // Whether the state is kept for all elements in parts_: Muon has no exp_avg_sq.
  bool keeps_all(State state) const { return state != State::exp_avg_sq || matrices_.size() == 0; }
  // Calls f(elements, states) for the pieces of `range`, which lies in one part of parts(): a tensor on the device for
  // each of kStates, empty if that isn't kept for all elements.
  using WithStates = std::function<void(const ElementRange&, const Tensor (&states)[kCount])>;
  void for_each_piece(Context&, const Parts::Part&, const ElementRange& range, const WithStates& f);
  // The weights with which the model computes for a parameter range; with a weight ring, the shard from which they are
  // gathered.
  Tensor weights_of(const Parts::Part&, const ElementRange&) const;
  // With split masters, a parameter range's tie bits; else empty.
  TieBits ties_of(const Parts::Part&, const ElementRange&) const;
  // With split masters: calls f(elements, their masters, room for these joined) for consecutive spans of a range.
  // remainder: the range's remainders.
  using WithRun = std::function<void(const ElementRange&, const SplitMaster&, const Tensor& joined)>;
  void for_each_run(const Parts::Part&, const ElementRange&, const Tensor& remainder, const WithRun& f) const;
  Tensor& kept(State state) { return kept_[static_cast<size_t>(state)]; }

  Params& params_;
  GradReducer* reducer_;
  Parts parts_;
  OptimizerKind kind_;
  ElementRange matrices_;  // elements that Muon updates, with train.optimizer muon
  Parts square_parts_;     // parts_ without matrices_
  CommQueue* ranks_;
  Update whole_, dense_;
  // Each [parts(state).size()], on the device, or with runtime.offload on the host. kept(State::parameter) is empty if
  // the parameters are in Params: all parameters' master weights, or weights that have no masters. With split masters
  // it has the remainders, [parts_.size(), 2] u8.
  Tensor kept_[kCount];
  bool split_;
  // With split masters, on the device: each remainder's tie bit in kept(State::parameter), and room [elements] f32 in
  // which masters are joined.
  Tensor ties_, joined_;
  std::optional<HostState> host_;
  Tensor own_weights_;  // this rank's weight shards, with a weight ring; without offload, kept(State::parameter)
  std::optional<WeightGather> gather_;
};

}  // namespace triad
