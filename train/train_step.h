// One optimizer step on one device: micro-steps that add up gradients, then the update. Owns what a step works on.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "model/model.h"
#include "train/config.h"
#include "train/optimizer.h"

namespace triad {

class TrainStep {
 public:
  TrainStep(Runtime&, const Config&);

  struct Result {
    double loss = 0;       // mean over the step's positions
    double grad_norm = 0;  // global, before clipping
    bool finite = true;    // otherwise nothing was updated
  };

  void begin();  // gradients and loss to zero
  // tokens, targets [B*T]. The gradient of the step is that of the mean over step_positions (of all its micro-steps).
  void micro_step(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t step_positions);
  // step: optimizer steps done before this one.
  Result finish(int64_t step, int64_t step_positions);
  // Sum of the losses of one micro-batch, without gradients.
  double evaluate(std::span<const int32_t> tokens, std::span<const int32_t> targets);
  // Name of the first parameter whose gradient is not finite, or "the loss" if all are.
  std::string first_bad_tensor();

  Model& model() { return model_; }
  Optimizer& optimizer() { return optimizer_; }
  Runtime& runtime() { return runtime_; }

 private:
  void upload(std::span<const int32_t> tokens, std::span<const int32_t> targets);

  Runtime& runtime_;
  Context& ctx_;
  const Config& config_;
  Model model_;
  Optimizer optimizer_;
  Activations act_;
  Tensor sums_;  // [3] f64: the step's loss, the gradient's squared norm, an evaluation's loss
};

Device choose_device(DeviceChoice);  // automatic: the GPU where one can be used; cuda without one is an error
DType compute_dtype(Precision);

// What a run of this config needs, found by a dry step on a planning context: no GPU, no memory.
struct MemoryPlan {
  int64_t arena_bytes = 0;  // scratch included
  int64_t scratch_bytes = 0;
  std::string report;  // by category
};
MemoryPlan plan_memory(const Config&, Device);
// Refuses, naming train.micro_batch_size and train.seq_len, a plan that exceeds the device's free memory.
std::unique_ptr<Runtime> allocate_planned(const Config&, Device);

}  // namespace triad
