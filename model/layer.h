// One transformer layer: x += Attention(RMSNorm(x)); x += MLP(RMSNorm(x)). Both stages have a forward and a backward.
#pragma once
#include "model/activations.h"
#include "model/layer_context.h"
#include "model/params.h"

namespace triad {

// Computes x_out [N,C] from a.x and fills the other tensors of the activations a.
void layer_forward(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights, LayerActivations& a,
                   Tensor x_out);
// Refills the tensors that layer lc.layer did not keep, from those that it kept, before its layer_backward, unless they
// still have the values of forward (RecomputePlan::replays). It uses the ops of forward, but keeps the selection lists
// of forward, so that all tensors get the same bits as in forward.
void layer_replay(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights, LayerActivations& a,
                  const RecomputePlan&);
// dx [N,C], compute dtype: on entry the gradient of x_out, on return that of a.x. Weight gradients are added to those
// in `grads`. a.mlp_pre is overwritten.
void layer_backward(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights,
                    const LayerTensors<Tensor>& grads, LayerActivations& a, Tensor dx);

}  // namespace triad
