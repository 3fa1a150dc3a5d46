// One transformer layer: x += Attention(RMSNorm(x)); x += MLP(RMSNorm(x)). Both stages have a forward and a backward.
#pragma once
#include "model/activations.h"
#include "model/asserts.h"
#include "model/grad_sink.h"
#include "model/layer_stats.h"
#include "model/params.h"

namespace triad {

// Arguments that all layers share.
struct LayerContext {
  const ModelConfig& config;
  ConstTensor rope_cos, rope_sin;  // [T, dk/2] acc
  int64_t B, T;
  bool keep_block_index =
      false;  // use the selection lists in LayerActivations as they are (finite differences hold them fixed)
  bool add_products = true;     // false: overwrite the gradients of ParamSpec::product, which hold no values yet
  GradSink* sink = nullptr;     // receives each finished gradient; may be null
  Asserts* asserts = nullptr;   // checks the output of each op; may be null
  int64_t layer = -1;           // index of the layer, for messages and statistics
  LayerStats* stats = nullptr;  // receives a forward's gates and lists, but not a replay's; may be null
};

// Computes x_out [N,C] from a.x and fills the other tensors of a.
void layer_forward(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights, LayerActivations& a,
                   Tensor x_out);
// Refills what a recomputing layer did not keep, from a.x (mlp: from a.x_mid), before its layer_backward. Uses the ops
// of forward, but keeps the selection lists of forward, so all tensors get the same bits.
void layer_replay(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights, LayerActivations& a,
                  Recompute recompute);
// dx [N,C] T: on entry the gradient of x_out, on return that of a.x. Weight gradients are added to.
void layer_backward(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights,
                    const LayerTensors<Tensor>& grads, LayerActivations& a, Tensor dx);

}  // namespace triad
