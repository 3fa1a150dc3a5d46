// One transformer layer: x += Attention(RMSNorm(x)); x += MLP(RMSNorm(x)). Both parts have a forward and a backward.
#pragma once
#include "model/activations.h"
#include "model/layer_context.h"
#include "model/params.h"

namespace triad {

// Computes x_out [N,C] from a.x and fills the other tensors in the activations a.
void layer_forward(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights, LayerActivations& a,
                   Tensor x_out);
// Refills the tensors that layer lc.layer did not keep, from those that it kept, before its layer_backward, unless they
// still have forward's values (RecomputePlan::replays). It uses forward's ops, but keeps forward's selection lists, so
// all tensors get the same bits as in forward.
void layer_replay(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights, LayerActivations& a,
                  const RecomputePlan&);
// dx [N,C], compute dtype: on entry x_out's gradient, on return a.x's. Weight gradients are added to those in `grads`.
// a.mlp_pre is overwritten.
void layer_backward(Context&, const LayerContext&, const LayerTensors<ConstTensor>& weights,
                    const LayerTensors<Tensor>& grads, LayerActivations& a, Tensor dx);

// Where an op that computes a parameter's gradient together with other results puts it: the gradient, or if the
// parameter is frozen, memory whose values nobody reads.
inline Tensor grad_or_unused(Scratch::Scope& scope, const Tensor& grad, const ConstTensor& weight) {
  return grad.empty() ? scope.alloc(acc_dtype(weight.dtype), weight.shape(), "unused gradient") : grad;
}

}  // namespace triad
