// The language model, a decoder: embedding -> layers -> RMSNorm -> head -> cross-entropy, with forward and backward.
#pragma once
#include <functional>
#include <map>
#include <utility>

#include "kernels/ops/cross_entropy.h"
#include "model/activations.h"
#include "model/fp8.h"
#include "model/layer.h"
#include "model/lora.h"
#include "model/params.h"
#include "model/weight_gate.h"

namespace triad {

// The objective's gradients with respect to two loss sums: the language model's over its rows, and the taught indices'
// over rows and groups.
struct LossScales {
  LossScale loss, index = 0.0;
  LossScales(double number) : loss(number) {}
  LossScales(LossScale to_loss, LossScale to_index = 0.0) : loss(to_loss), index(to_index) {}
};

class SequenceGroup;

class Model {
 public:
  struct Options {
    DType dtype = DType::f32;
    bool training = true;  // allocate gradients, and with `master` for bf16 also fp32 master weights
    int64_t max_seq_len = 0;
    // See Params::Options. With weight_windows or grad_windows, passes need a gate or a sink.
    int64_t shard_elements = 1;
    bool master = true;  // only used when training in bf16
    bool weight_windows = false, grad_windows = false;
    SequenceGroup* group = nullptr;  // the ranks that share each sequence; null: this rank has whole ones
    // Whether a layer's attention projections and MLP multiply in fp8 (linear_fp8.h); empty: no layer's.
    std::vector<bool> fp8_layers = {};
    std::optional<LoraConfig> lora = {};  // adapters; the other weights are then frozen, in base()
  };
  Model(Context&, Arena&, const ModelConfig&, const Options&);

  const ModelConfig& config() const { return config_; }
  DType dtype() const { return options_.dtype; }
  int64_t max_seq_len() const { return options_.max_seq_len; }
  Params& params() { return params_; }
  // The weights that are not trained; null without LoRA.
  Params* base() { return base_ ? &*base_ : nullptr; }
  // The weights as decoding steps use them (decode.h).
  const ModelTensors<ConstTensor>& weights() const { return w_; }
  // Tables of the angles by which a layer's q and k turn, [max_seq_len, dk/2] acc, and the same for its index.
  const RopeTables& rope(int64_t layer) const { return rope_.at({config_.d_k, config_.rotates(layer)}); }
  const RopeTables& index_rope(int64_t layer) const {
    return rope_.at({config_.nsa_at(layer).d_index, config_.rotates(layer)});
  }
  // [layers] f64, in a model for training with a taught index: loss_and_backward() adds each layer's index loss, summed
  // over the batch's rows and groups.
  Tensor index_loss() const { return index_loss_; }
  // true: forward attends to the selection lists in the activations instead of selecting, for finite differences and
  // comparisons.
  void keep_block_index(bool keep) { keep_block_index_ = keep; }
  // true: all layers of an NSA model attend as dense layers do, with the window branch's keys and values. Parameters
  // that such a pass doesn't use (used_by_dense_pass) get zero gradients.
  void attend_densely(bool dense) { dense_ = dense; }
  // In every later pass, counts what casts to e4m3 lose: counts [Fp8Role::count, E4m3Counts::count] f64 are added to.
  // A recomputation does not count again. An absent tensor ends it.
  void count_fp8(Tensor counts) { fp8_counts_ = counts; }
  // In every later pass, checks tokens, selection lists, and that all values are finite. null ends the checks.
  void watch(Asserts* asserts) { asserts_ = asserts; }

  // Forward of the layers: act.tokens [B,T], each in [0, V), -> act.x(n_layers). stats: accumulates each layer's gates
  // and lists. gate: called before any weight is read, loss()'s included. after_layer: called with each layer's
  // activations; if layers share buffers, layer i+2 overwrites them.
  using AfterLayer = std::function<void(int64_t layer, LayerActivations&)>;
  void forward(Context&, Activations& act, LayerStats* stats = nullptr, WeightGate* gate = nullptr,
               const AfterLayer& after_layer = nullptr);
  // Call after forward: computes act.row_loss[i], which is 0 where the target is -1.
  void loss(Context& ctx, Activations& act) { loss(ctx, act, 0, act.rows()); }
  void loss(Context&, Activations& act, int64_t begin, int64_t end);  // the same for rows [begin, end) alone
  // Call once after each forward, because it overwrites tensors in act: computes act.row_loss, and adds the gradients
  // of scales.loss * sum(row_loss) + scales.index * sum(index_loss()) to params().grads(). first: matrix product
  // gradients hold no values yet and are overwritten, so only params().added_grads() must be zeroed before; gradients
  // in the layer ring are overwritten in every pass; with lent gradients (Params::lend_grads) every pass must be a
  // first one. sink: receives each gradient when it is finished, the head's first and the embedding's last. gate:
  // called before a layer's weights are read.
  void loss_and_backward(Context&, Activations& act, const LossScales& scales, bool first = false,
                         GradSink* sink = nullptr, WeightGate* gate = nullptr);
  // Call after forward: computes logits [n, padded vocabulary], compute dtype, for rows [begin, begin + n) in act.
  void logits(Context&, Activations& act, int64_t begin, Tensor logits);

 private:
  LayerContext layer_context(const Activations& act, int64_t layer) const;
  Tensor final_norm(Context&, Activations& act, int64_t begin, int64_t end, Scratch::Scope&);  // rows [begin, end)
  void open_grads(Context&, GradSink*, int64_t segment);

  ModelConfig config_;
  Options options_;
  std::unique_ptr<const AttentionExec> exec_;
  Params params_;
  std::optional<Params> base_;
  std::vector<LoraLayer> lora_;  // layers' adapters; empty without LoRA
  ModelTensors<ConstTensor> w_;
  ModelTensors<Tensor> g_;
  std::map<std::pair<int64_t, bool>, RopeTables> rope_;  // key: head width, and whether the layer rotates
  Tensor index_loss_;                                    // see index_loss()
  Tensor fp8_counts_;                                    // see count_fp8()
  bool keep_block_index_ = false, dense_ = false;
  Asserts* asserts_ = nullptr;
};

}  // namespace triad
