// One transformer layer: x += Attention(RMSNorm(x)); x += MLP(RMSNorm(x)). Two stages, each with its mirror image.
#pragma once
#include "model/activations.h"
#include "model/asserts.h"
#include "model/grad_sink.h"
#include "model/layer_stats.h"
#include "model/params.h"

namespace triad {

// What every layer shares.
struct LayerContext {
  const ModelConfig& config;
  ConstTensor rope_cos, rope_sin;  // [T, dk/2] acc
  int64_t B, T;
  bool keep_block_index = false;  // take the selection lists as they stand (finite differences hold them fixed)
  bool add_products = true;       // false: gradients of ParamSpec::product hold nothing yet and are overwritten
  GradSink* sink = nullptr;       // told of each gradient that backward has finished
  Asserts* asserts = nullptr;     // checks what each op writes, where given
  int64_t layer = -1;             // which one this is, for its messages
  LayerStats* stats = nullptr;    // told of a forward's gates and lists, where given; not of a replay's
};

// a.x -> x_out [N,C]; fills in the rest of a.
void layer_forward(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights, LayerActivations& a,
                   Tensor x_out);
// Before layer_backward of a layer that recomputes: what a lacks, from a.x (mlp: from a.x_mid), by the same ops as in
// forward, but with the lists that forward selected.
void layer_replay(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights, LayerActivations& a,
                  Recompute recompute);
// dx [N,C] T: comes in as the gradient of x_out, goes out as that of a.x. Weight gradients are added to.
void layer_backward(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights,
                    const LayerTensors<Tensor>& grads, LayerActivations& a, Tensor dx);

}  // namespace triad
