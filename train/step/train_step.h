// TrainStep: one optimizer step on one device: micro-steps that accumulate gradients, then the update. Owns the model,
// its activations and the optimizer. With train.stages, all stages' activations share memory. With several ranks,
// gradients are summed over the ranks (train/dist/), and each rank updates all parameters or its shards.
//
// The host queues a step without waiting for the device: tokens are copied from pinned memory, the device itself skips
// the update if the gradient is not finite (kernels/step/step_guard.h), and the step's numbers are copied to pinned
// memory, where result() reads them later. So the host can queue the next step while the device computes this one.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/comm/comm.h"
#include "model/index_sample.h"
#include "model/layer_stats.h"
#include "model/lent_grads.h"
#include "model/model.h"
#include "model/sequence/group.h"
#include "train/config/config.h"
#include "train/config/schedule.h"
#include "train/monitor/backward_trace.h"
#include "train/monitor/grad_ledger.h"
#include "train/step/batch_ring.h"
#include "train/step/micro_step_graphs.h"
#include "train/step/optimizer.h"
#include "train/step/step_results.h"

namespace triad {

// Which rows teach a taught index: all but padding, whether they have targets or not.
struct IndexRows {
  std::span<const int32_t> padding_begin = {};  // each sequence's first padded token; empty: no padding
  int64_t in_step = 0;                          // tokens in all ranks' micro-steps that are not padding; 0: all tokens
};

// Rows of an evaluation in which a taught index's lists are compared with dense attention (model/index_sample.h).
struct SampledRows {
  std::span<const int32_t> tokens = {};  // numbered in the batch's tokens; at most IndexSample::kMostRows
  bool dense = false;                    // see IndexSample::add
};

class TrainStep {
 public:
  // comm: null with one rank. most_documents: most documents in a row; 0: every row is one document. planned_rank:
  // while memory is planned, the rank within a group that shares sequences (dist.context).
  TrainStep(Runtime&, const Config&, Comm* comm = nullptr, int64_t most_documents = 0, int64_t planned_rank = 0);

  using Times = StepResults::Times;
  struct Result {
    double loss = 0;       // mean over the step's targets; 0 if there are none
    int64_t targets = 0;   // the step's targets on all ranks; without any, the update was skipped
    double grad_norm = 0;  // global L2 norm before clipping, without a taught index's gradients
    // For a taught index: mean loss over rows and groups, summed over layers; and its gradients' norm before clipping.
    double index_loss = 0, index_grad_norm = 0;
    std::vector<double> index_losses;  // log.stats: index_loss by layer, 0 in layers without an index
    bool finite = true;      // false: the update was skipped, and with on_nonfinite stop so are all later ones
    std::string bad_tensor;  // if not finite: the first gradient that is not, or "the loss" if all gradients are finite
    // If not finite: the first rank whose own gradient or loss is not. -1: each rank's own is finite, only the sum is
    // not.
    int64_t bad_rank = -1;
    bool stop = false;  // a rank has requested an orderly stop
    Times times;
    std::optional<GradNorms> grads;            // if update() was called with measure
    std::vector<BackwardTrace::Op> trace;      // if begin() was called with trace
    std::optional<BucketTrace::Step> buckets;  // present with several ranks and log.diagnostics "buckets"
    // With log.stats: [Fp8Role::count, E4m3Counts::count], over micro-steps and ranks; empty without fp8.
    std::vector<double> fp8_counts;
    // With log.stats: by layer, over micro-steps and ranks; dense layers: no rows. Empty for a dense step.
    std::vector<NsaStats> stats;
  };

  // Begins a step: clears gradients and loss. trace: records times in the first micro-step's backward, op by op (which
  // is then not replayed from a graph). step: as in update(); it decides the stage and whether the step is dense, and
  // with train.grads_dtype bf16 how gradient sums are rounded.
  void begin(bool trace = false, int64_t step = 0);
  // Queues forward and backward on tokens and targets [B*T], whole sequences even if ranks share them. The step's
  // gradient is for the summed losses divided by step_positions, the targets other than -1 in all ranks' micro-steps,
  // which may differ from step to step; 0 if the step has none. With several ranks a step has exactly
  // train.accumulate_grad_batches micro-steps, and with one rank at most one if this is 1. bounds: document bounds in
  // the B*T tokens (nsa/document_tables.h), needed if the step was built with most_documents.
  void micro_step(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t step_positions,
                  std::span<const int32_t> bounds = {}, const IndexRows& index_rows = {});
  // Queues the update, which changes nothing if step_positions is 0. step: optimizer steps done before this one. stop:
  // this rank requests an orderly stop. measure: the result has each gradient's norm. Throws MissingGradients if
  // backward did not announce every gradient.
  void update(int64_t step, int64_t step_positions, bool stop = false, bool measure = false);
  // Waits for the oldest queued update and returns its result; at most kMaxQueued may be queued. Throws if
  // runtime.asserts has found a violation in that step.
  Result result();
  static constexpr size_t kMaxQueued = StepResults::kMaxQueued;
  // update(), then result().
  Result finish(int64_t step, int64_t step_positions) {
    update(step, step_positions);
    return result();
  }
  // From here on batches have this stage's sequences; begin() does this too.
  void enter(const TrainStage&);
  // Runs a forward, with model.*'s attention, and returns the losses of one micro-batch, summed, in the current stage.
  // Waits for the device. With dist.zero 3 all ranks call it. Not between micro_step() and update(): activations may be
  // in gradient memory.
  // sampled: only if samples_index().
  double evaluate(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                  std::span<const int32_t> bounds = {}, const SampledRows& sampled = {});
  // Whether evaluations can sample a taught index; and the last such sample.
  bool samples_index() const { return index_sample_ != nullptr; }
  std::vector<IndexRecall> index_recall() { return index_sample_->read(ctx_); }

  Model& model() { return model_; }
  // From the last micro-step or evaluation. Backward overwrites the layers' tensors.
  Activations& activations() { return form().act; }
  Optimizer& optimizer() { return optimizer_; }
  SequenceGroup* sequence_group() { return group_ ? &*group_ : nullptr; }                // null with dist.context 1
  const GradReducer* reducer() const { return world_ == 1 ? nullptr : reducer_.get(); }  // null with one rank
  // The ranks among which the parameters are divided; null if each rank has all.
  Comm* shards() { return sharded() ? &groups_->replica : nullptr; }
  // Destroys the recorded graphs. Call it before Comm::finish(), in which NCCL waits while a graph holds exchanges.
  void forget_graphs();
  Runtime& runtime() { return runtime_; }
  const GradLedger& ledger() const { return ledger_; }

 private:
  // What depends on the number and length of a micro-step's sequences.
  struct Form {
    int64_t sequences, seq_len;
    Activations act;
    MicroStepGraphs graphs;
  };
  Form& form() { return forms_[form_]; }
  std::deque<Form> make_forms(int64_t most_documents, int64_t planned_rank);

  void upload(const HostBatch&, int64_t step_positions, int64_t index_rows);
  void forward_backward(bool first, GradSink* sink = nullptr);
  bool sharded() const { return is_sharded(config_, world_); }
  bool windows() const { return has_grad_windows(config_, world_); }
  bool records_graphs() const;
  // Whether activations may be in gradient memory (model/lent_grads.h).
  bool lends_grads() const { return !windows() && config_.train.accumulate_grad_batches == 1 && !config_.train.lora; }
  // This step's gradients, summed over micro-steps and ranks, and the parts that this rank has.
  Tensor sums() { return reducer_ ? reducer_->sums() : model_.params().grads(); }
  Parts grad_parts() { return reducer_ ? reducer_->parts() : Parts::whole(model_.params()); }
  void sum_over_ranks(bool stop);
  void sum_squares();
  void forbid_update();
  std::optional<RankGroups> make_groups();
  std::unique_ptr<GradReducer> make_reducer();
  Tensor make_grad_ranges();
  void measure_gradients();
  Tensor make_layer_numbers();
  std::unique_ptr<LayerStats> make_stats();
  std::unique_ptr<IndexSample> make_index_sample();
  Tensor all_layer_numbers() const;  // the tensor that holds layer_numbers_ of all ranks
  std::vector<NsaStats> read_stats(const std::byte* copied) const;
  std::vector<double> read_sums(const std::byte* copied, int64_t first, int64_t count) const;

  Runtime& runtime_;
  Context& ctx_;
  const Config& config_;
  Comm* comm_;
  int64_t world_;
  SequenceLayout sequence_layout_;      // layout of the longest sequences
  std::optional<SequenceGroup> group_;  // the ranks that share each sequence; absent with dist.context 1
  Model model_;
  // [world, RankNumbers::count + n] f64: for each rank its RankNumbers and its n layer_numbers_. Empty if there is one
  // rank.
  Tensor ranks_;
  // With log.stats: [n] f64, this rank's statistics by layer, a taught index's losses by layer, counts of e4m3 casts.
  Tensor layer_numbers_;
  std::unique_ptr<Comm> alone_;                // a single rank's, with a layer ring and without comm
  std::optional<RankGroups> groups_;           // present with comm_ or alone_
  std::unique_ptr<GradReducer> reducer_;       // null with one rank, unless gradients have a layer ring
  std::unique_ptr<BucketTrace> bucket_trace_;  // log.diagnostics "buckets"
  Optimizer optimizer_;
  std::unique_ptr<LayerStats> stats_;          // log.stats
  Tensor fp8_counts_;                          // log.stats: [Fp8Role::count, E4m3Counts::count] f64; absent without fp8
  std::unique_ptr<IndexSample> index_sample_;  // log.stats, in runs with evaluations and without dist.context
  GradLedger ledger_;
  BackwardTrace trace_;
  std::deque<Form> forms_;
  size_t form_ = 0;
  std::unique_ptr<Asserts> asserts_;  // runtime.asserts
  Tensor numbers_;                    // [StepNumbers::count] f64
  Tensor eval_loss_;                  // [1] f64
  // 1 / step_positions, and nsa.index_loss / (rows of the step * groups); 0 if the step has no such position, or no
  // row.
  ScaleTensors scales_;
  // [ranges, 2] i64: first element and size for each range in this rank's sums that belongs to one parameter, for the
  // step guard; and the parameters' numbers.
  std::vector<int64_t> param_of_range_;
  Tensor grad_ranges_;

  std::optional<BatchRing> batches_;  // absent while memory is planned, as are the results
  std::optional<StepResults> results_;

  bool dense_ = false;  // the current step is dense
  bool trace_wanted_ = false;
  int64_t step_ = 0;
  int64_t index_rows_ = 0;   // this step's IndexRows::in_step
  int64_t micro_steps_ = 0;  // micro-steps in this step so far; the first one overwrites the matrices' gradients
};

}  // namespace triad
