// A small model with a batch, on any device and dtype: what the model's tests share.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "model/model.h"

namespace triad::test {

// 2 layers, 6 heads in 2 groups, odd widths; every branch has work at T = 70 already.
ModelConfig small_model();

// The same random parameters (every tensor N(0, std), biases and norms too) and tokens on every device and dtype.
class ModelFixture {
 public:
  ModelFixture(const ModelConfig&, int64_t B, int64_t T, Device, DType, uint64_t seed = 3, double std = 0.1,
               const RecomputePlan& = {}, const KernelChoices& = {});

  double loss();                                      // forward: the mean over the batch
  double loss_and_grads();                            // forward and backward of that mean, gradients from zero
  std::vector<double> grad(int64_t i);                // of parameter i
  std::vector<float>& parameters() { return host_; }  // as stored; call upload() after a change
  void upload() { model_->params().set(runtime_->ctx(), host_); }
  // Weights in f64 are set one by one, without the rounding of parameters().
  void set_f64(int64_t i, int64_t element, double value);
  double get_f64(int64_t i, int64_t element);
  // Selection lists and gates of a layer, on the host.
  std::vector<int32_t> lists(int64_t layer);
  void set_lists(int64_t layer, const std::vector<int32_t>&);  // and hold them fixed from now on

  Context& ctx() { return runtime_->ctx(); }
  Model& model() { return *model_; }
  Activations& activations() { return *act_; }

 private:
  double mean_loss();
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Activations> act_;
  std::vector<float> host_;
};

}  // namespace triad::test
