// One optimizer step on one device: micro-steps that add up gradients, then the update. Owns what a step works on. With
// several ranks gradients are summed over them during the last micro-step, and each rank makes the same update.
// Nothing in a step waits for the device: tokens go up from pinned memory, the device judges the gradient and updates
// or not, and the step's numbers come down to pinned memory, where result() finds them later. So the host may queue the
// next step meanwhile.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/graph.h"
#include "model/layer_stats.h"
#include "model/model.h"
#include "train/config.h"
#include "train/monitor/backward_trace.h"
#include "train/monitor/grad_ledger.h"
#include "train/optimizer.h"

namespace triad {

class TrainStep {
 public:
  // comm: absent in a world of one.
  TrainStep(Runtime&, const Config&, Comm* comm = nullptr);

  struct Result {
    double loss = 0;         // mean over the step's positions
    double grad_norm = 0;    // global, before clipping
    bool finite = true;      // otherwise nothing was updated, and (train.on_nonfinite stop) nothing will be
    std::string bad_tensor;  // not finite: the first gradient that is not, or "the loss" if all are
    int64_t bad_rank = -1;   // not finite: the first rank whose own share is not; -1: the ranks' sum alone
    bool stop = false;       // a rank asked for an orderly end
    double comm_ms = 0;      // that the step waited for other ranks, behind its own work
    double gather_ms = 0;    // that its new weights came in after it, beside the next forward: that waits for less
    double compute_ms = 0, update_ms = 0;      // of the device: micro-steps; norm, verdict and optimizer
    std::optional<GradFacts> grads;            // where update() was to measure them
    std::vector<BackwardTrace::Op> trace;      // where begin() was to trace
    std::optional<BucketTrace::Step> buckets;  // with diagnosis "buckets", of several ranks
    std::vector<NsaStats> stats;               // with log.stats by layer, of all micro-steps and ranks; dense: none
  };

  // Forgets gradients and loss. trace: the first micro-step's backward is traced (and not replayed from a graph).
  void begin(bool trace = false);
  // tokens, targets [B*T]. The gradient of the step is that of the mean over step_positions (of all ranks and
  // micro-steps). With several ranks a step has train.accumulate_grad_batches of them.
  void micro_step(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t step_positions);
  // Queues the update. step: optimizer steps done before this one. stop: this rank asks for an orderly end. measure: of
  // each gradient the norm, for the result. Throws MissingGradients if backward did not tell of each.
  void update(int64_t step, int64_t step_positions, bool stop = false, bool measure = false);
  // Waits for the oldest update whose result was not yet asked for; at most kMaxQueued may be. Throws where
  // runtime.asserts found something wrong in that step.
  Result result();
  static constexpr size_t kMaxQueued = 2;
  // Both at once.
  Result finish(int64_t step, int64_t step_positions) {
    update(step, step_positions);
    return result();
  }
  // Sum of the losses of one micro-batch, without gradients.
  double evaluate(std::span<const int32_t> tokens, std::span<const int32_t> targets);

  Model& model() { return model_; }
  Activations& activations() { return act_; }  // of the last micro-step or evaluation
  Optimizer& optimizer() { return optimizer_; }
  const GradReducer* reducer() const { return reducer_.get(); }
  Runtime& runtime() { return runtime_; }
  const GradLedger& ledger() const { return ledger_; }

 private:
  void upload(std::span<const int32_t> tokens, std::span<const int32_t> targets);
  void forward_backward(int64_t step_positions, bool first, GradSink* sink = nullptr);
  bool zero() const { return reducer_ && config_.dist.zero == 1; }
  void sum_over_ranks(bool stop);
  std::vector<ElementRange> own_elements() const;
  void measure_gradients();
  std::unique_ptr<LayerStats> make_stats();
  Tensor all_stats() const;  // what holds them, of all ranks
  std::vector<NsaStats> read_stats(const std::byte* copied) const;

  Runtime& runtime_;
  Context& ctx_;
  const Config& config_;
  Comm* comm_;
  int64_t world_;
  Model model_;
  Tensor ranks_;  // [world, RankNumbers::count, and a rank's stats_] f64; absent in a world of one
  std::unique_ptr<GradReducer> reducer_;       // likewise
  std::unique_ptr<BucketTrace> bucket_trace_;  // of its buckets, where asked for
  Optimizer optimizer_;
  std::unique_ptr<LayerStats> stats_;  // log.stats
  GradLedger ledger_;
  BackwardTrace trace_;
  Activations act_;
  std::unique_ptr<Asserts> asserts_;  // runtime.asserts
  Tensor numbers_;                    // [StepNumbers::count] f64
  Tensor eval_loss_;                  // [1] f64
  Tensor parts_;                      // [parameters,2] i64: where each gradient lies, for the verdict

  // Pinned memory, taken in turns; an event tells when the device is done with it.
  struct Slot {
    Slot(Device device, int64_t bytes, bool timed = false) : memory(device, bytes), done(device, timed) {}
    PinnedMemory memory;
    Event done;
  };
  struct ResultSlot : Slot {
    ResultSlot(Device device, int64_t bytes)
        : Slot(device, bytes, true),
          began(device, true),
          computed(device, true),
          summed(device, true),
          gathered(device, true) {}
    Event began, computed, summed;  // the step; this rank's gradients; those of all
    Event gathered;                 // weights of all ranks; on the comm stream, with dist.zero 1
    double host_ms = 0;             // that the host waited for other ranks
    double inside_ms = 0;           // of which before `computed`: on the CPU the host is what computes
  };
  std::deque<Slot> batches_;
  std::deque<ResultSlot> results_;
  size_t next_batch_ = 0;
  struct Queued {
    size_t slot;
    int64_t step, step_positions;
    bool measured;
  };
  std::deque<Queued> queued_;
  size_t next_result_ = 0;

  // A step's first micro-step, the others, and with several ranks its last one, recorded. They hold step_positions:
  // another number records them anew.
  struct Recording {
    explicit Recording(Device device) : graph(device) {}
    Graph graph;
    int64_t step_positions = 0;
  };
  Recording first_, later_, summed_;
  bool trace_wanted_ = false;
  int64_t micro_steps_ = 0;  // of this step; before the first the gradients of the products hold nothing
};

// automatic: the GPU where one can be used; cuda without one is an error. Of several GPUs that of the process's rank.
Device choose_device(DeviceChoice, const LaunchEnv& env = {});
DType compute_dtype(Precision);

}  // namespace triad
