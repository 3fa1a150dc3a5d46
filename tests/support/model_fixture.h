// A small model with a batch, on any device and in any dtype, for the tests of model/.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "model/model.h"

namespace triad::test {

// 2 layers, 6 heads in 2 groups, odd widths. At T = 70 every branch has work to do.
ModelConfig small_model();

// Parameters (every tensor N(0, std), also biases and norms) and tokens are the same on every device and in every
// dtype.
class ModelFixture {
 public:
  ModelFixture(const ModelConfig&, int64_t B, int64_t T, Device, DType, uint64_t seed = 3, double std = 0.1,
               const RecomputePlan& = {}, const KernelChoices& = {});

  double loss();                                      // runs forward; the mean loss of the batch
  double loss_and_grads();                            // runs forward and backward of that mean; overwrites gradients
  std::vector<double> grad(int64_t i);                // gradient of parameter i
  std::vector<float>& parameters() { return host_; }  // in storage order; call upload() after a change
  void upload() { model_->params().set(runtime_->ctx(), host_); }
  // Access to single weights in f64, without the rounding of parameters().
  void set_f64(int64_t i, int64_t element, double value);
  double get_f64(int64_t i, int64_t element);
  // Selection lists of a layer.
  std::vector<int32_t> lists(int64_t layer);
  void set_lists(int64_t layer, const std::vector<int32_t>&);  // forward then keeps the lists instead of selecting

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
