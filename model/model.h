// The decoder: embedding -> layers -> RMSNorm -> head -> cross-entropy, and back.
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
    bool training = true;  // gradients, and a master copy in bf16
    int64_t max_seq_len = 0;
    int64_t shard_elements = 1;  // Params::Options
  };
  Model(Context&, Arena&, const ModelConfig&, const Options&);

  const ModelConfig& config() const { return config_; }
  DType dtype() const { return options_.dtype; }
  int64_t max_seq_len() const { return options_.max_seq_len; }
  Params& params() { return params_; }
  // What a decoding step reads (decode.h).
  const ModelTensors<ConstTensor>& weights() const { return w_; }
  ConstTensor rope_cos() const { return rope_cos_; }
  ConstTensor rope_sin() const { return rope_sin_; }
  // Finite differences and comparisons hold the selection lists of the activations fixed.
  void keep_block_index(bool keep) { keep_block_index_ = keep; }
  // Check values as they come about: tokens, lists, and that all is finite. Null: no more.
  void watch(Asserts* asserts) { asserts_ = asserts; }

  // act.tokens [B,T] in [0, V) -> act.x(n_layers)
  // stats: told of each layer's gates and lists. gate: asked for all weights, the head's too, before they are read.
  // after_layer: sees each layer's activations once they are there; layers that share theirs overwrite them two layers
  // on.
  using AfterLayer = std::function<void(int64_t layer, LayerActivations&)>;
  void forward(Context&, Activations& act, LayerStats* stats = nullptr, WeightGate* gate = nullptr,
               const AfterLayer& after_layer = nullptr);
  // After forward: act.row_loss[i], 0 where the target is -1.
  void loss(Context&, Activations& act);
  // After forward: act.row_loss, and the gradients of scale * sum of row_loss are added to params().grads(). first:
  // those of the products hold nothing yet and are overwritten (so that only params().added_grads() need be zero
  // before). sink: told of each gradient as it is finished, the head's first and the embedding's last.
  void loss_and_backward(Context&, Activations& act, double scale, bool first = false, GradSink* sink = nullptr);
  // After forward: logits [n, padded V] T of the rows [begin, begin + n) of act.
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
