// The decoder: embedding -> layers -> RMSNorm -> head -> cross-entropy, forward and backward.
#pragma once
#include <functional>

#include "model/activations.h"
#include "model/layer.h"
#include "model/params.h"
#include "model/weight_gate.h"

namespace triad {

class Model {
 public:
  struct Options {
    DType dtype = DType::f32;
    bool training = true;  // allocates gradients, and master weights in bf16
    int64_t max_seq_len = 0;
    int64_t shard_elements = 1;  // as in Params::Options
  };
  Model(Context&, Arena&, const ModelConfig&, const Options&);

  const ModelConfig& config() const { return config_; }
  DType dtype() const { return options_.dtype; }
  int64_t max_seq_len() const { return options_.max_seq_len; }
  Params& params() { return params_; }
  // Used by decoding steps (decode.h).
  const ModelTensors<ConstTensor>& weights() const { return w_; }
  ConstTensor rope_cos() const { return rope_cos_; }
  ConstTensor rope_sin() const { return rope_sin_; }
  // If true, forward uses the selection lists in the activations instead of selecting (finite differences,
  // comparisons).
  void keep_block_index(bool keep) { keep_block_index_ = keep; }
  // Checks tokens, lists, and that all values are finite, in every later pass; null ends the checks.
  void watch(Asserts* asserts) { asserts_ = asserts; }

  // act.tokens [B,T] in [0, V) -> act.x(n_layers)
  // stats: accumulates each layer's gates and lists. gate: called before a weight is read, the head's included.
  // after_layer: called with each layer's activations; if layers share buffers, layer i+2 overwrites them.
  using AfterLayer = std::function<void(int64_t layer, LayerActivations&)>;
  void forward(Context&, Activations& act, LayerStats* stats = nullptr, WeightGate* gate = nullptr,
               const AfterLayer& after_layer = nullptr);
  // After forward: computes act.row_loss[i], which is 0 where the target is -1.
  void loss(Context&, Activations& act);
  // After forward: computes act.row_loss, and adds the gradients of scale * sum(row_loss) to params().grads(). first:
  // the gradients of the products hold no values yet and are overwritten (so only params().added_grads() must be zeroed
  // before). sink: receives each finished gradient, the head's first and the embedding's last.
  void loss_and_backward(Context&, Activations& act, double scale, bool first = false, GradSink* sink = nullptr);
  // After forward: computes logits [n, padded V] T of the rows [begin, begin + n) of act.
  void logits(Context&, Activations& act, int64_t begin, Tensor logits);

 private:
  LayerContext layer_context(const Activations& act, int64_t layer) const;
  void expect_finite(Context&, const char* op, const char* name, ConstTensor x) const;
  Tensor final_norm(Context&, Activations& act, Scratch::Scope&);

  ModelConfig config_;
  Options options_;
  Params params_;
  ModelTensors<ConstTensor> w_;
  ModelTensors<Tensor> g_;
  Tensor rope_cos_, rope_sin_;  // [max_seq_len, dk/2] acc
  bool keep_block_index_ = false;
  Asserts* asserts_ = nullptr;
};

}  // namespace triad
