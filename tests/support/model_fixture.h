// A small model and a token batch, on any device and in any dtype, for the tests in model/.
#pragma once
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "model/model.h"

namespace triad::test {

// Returns a config with 2 layers, 6 heads in 2 groups and odd widths. At T = 70 every branch attends to some keys.
ModelConfig small_model();
// The same with four layers that differ by nsa.layers: the group's options; other strides, lists and window; a window
// alone; one softmax over an index's blocks.
ModelConfig layered_model();
// small_model() with four layers and a change, resolved.
ModelConfig changed(const std::function<void(ModelConfig&)>& change);
// The parameters of a layer, without "blocks.N.".
std::set<std::string> names_of_layer(const ModelConfig&, int64_t layer);

// The model, with the same parameters and tokens on every device and in every dtype. All parameters are drawn from N(0,
// std), biases and norms too; those that LoRA freezes as without it.
class ModelFixture {
 public:
  ModelFixture(const ModelConfig&, int64_t B, int64_t T, Device, DType, uint64_t seed = 3, double std = 0.1,
               const RecomputePlan& = {}, const KernelChoices& = {}, int64_t most_documents = 0,
               const std::vector<bool>& fp8_layers = {}, const std::optional<LoraConfig>& = {});

  double loss();                                      // runs forward; the batch's mean loss
  double loss_and_grads();                            // runs forward and backward for that mean; overwrites gradients
  std::vector<double> grad(int64_t i);                // parameter i's gradient
  std::vector<float>& parameters() { return host_; }  // storage order; call upload() after a change
  void upload() { model_->params().set(runtime_->ctx(), host_); }
  // Access to single weights in f64, without the rounding of parameters().
  void set_f64(int64_t i, int64_t element, double value);
  double get_f64(int64_t i, int64_t element);
  // Central difference: loss() as one element of parameter i moves up and down; the element's value is restored.
  double central_difference(int64_t i, int64_t element);
  // Blocks that each row selected in this layer in the last forward pass.
  std::vector<int32_t> lists(int64_t layer);
  void set_lists(int64_t layer, const std::vector<int32_t>&);  // later forward passes use these lists and do not select

  // Document bounds in the B*T tokens, with at most `most_documents` documents per row.
  void set_documents(std::vector<int32_t> bounds);

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
