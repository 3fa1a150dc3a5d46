// What a layer's functions need besides its weights and activations. Outside the layers, Model uses the checks.
#pragma once
#include "model/asserts.h"
#include "model/grad_sink.h"
#include "model/layer_stats.h"
#include "model/sequence/layout.h"

namespace triad {

class AttentionExec;
struct LoraLayer;  // lora.h

// The same for all layers, except `layer`.
struct LayerContext {
  const ModelConfig& config;
  const AttentionExec& exec;
  RopeTables rope;             // the layer's q and k
  RopeTables index_rope = {};  // its index
  int64_t B, T;                // T: tokens per sequence on this rank
  // The documents in packed rows, absent if every row is one document; and which tokens of each sequence this rank has.
  Documents documents = {};
  SequenceLayout layout = {};
  // true: attend to the selection lists in LayerActivations instead of selecting, so that finite differences hold the
  // lists fixed.
  bool keep_block_index = false;
  // For a taught index: whether forward computes what backward needs; the objective's gradient with respect to the sums
  // in index_loss [layers] f64, to which backward adds; each sequence's first padded token (nsa/index.h).
  bool teaches_index = false;
  LossScale index_scale = 0.0;
  Tensor index_loss = {};
  ConstTensor padding_begin = {};
  bool dense = false;               // attend as a dense layer, with the window branch's keys and values
  bool add_products = true;         // false: gradients with ParamSpec::product hold no values yet and are overwritten
  GradSink* sink = nullptr;         // receives each gradient when it is finished; may be null
  Asserts* asserts = nullptr;       // checks each op's output; may be null
  int64_t layer = -1;               // layer index; -1: outside the layers
  bool fp8 = false;                 // linear layers multiply in e4m3, in forward and backward
  Tensor fp8_counts = {};           // [Fp8Role::count, E4m3Counts::count] f64, what casts add to; absent: not counted
  const LoraLayer* lora = nullptr;  // null: no linear layer has adapters
  LayerStats* stats = nullptr;      // receives gates and lists in forward, not in a recomputation; may be null

  const NsaConfig& nsa() const { return config.nsa_at(layer); }  // the layer's options
  // The layer's kind, by which its parameters and activations are laid out; and how it attends in this pass.
  AttentionKind kind() const { return config.attention_of(layer); }
  AttentionKind attention() const { return dense ? AttentionKind::dense : kind(); }
  // With runtime.asserts: checks that tensors are finite, after several ops, in the order in which these wrote the
  // tensors.
  void expect_finite(Context& ctx, std::initializer_list<Asserts::Written> written) const {
    if (asserts != nullptr) asserts->finite(ctx, layer, written);
  }
};

}  // namespace triad
