// A layer's attention between the fused q, k, v projection and out_proj, for each AttentionKind. Only in this file do
// layout, kept tensors, forward and backward depend on the kind. (The parameters in param_specs, the cost in flops.h's
// attended_pairs and the cache in decode.cpp depend on the kind too.)
#pragma once
#include <functional>
#include <string>

#include "model/attention_exec.h"
#include "model/unused_memory.h"

namespace triad {

// What forward saves for backward: `nsa` in an NSA layer, `dense` in a dense one or one with a window alone. An NSA
// layer has both, for dense passes: there `dense` shares memory with the window branch's tensors in `nsa`. A layer with
// one softmax over selected blocks has its lists in `nsa`, and o and lse in `dense`. A taught index's lse is in `nsa`,
// in dense passes too.
struct AttentionSaved {
  NsaSaved nsa;
  DenseSaved dense;
};
// kept: allocates the tensors that are never recomputed (selection lists, the index's lse). alloc: allocates all
// others. T: tokens per sequence on this rank, of row_tokens in all.
using AllocTensor = std::function<Tensor(const std::string& name, DType, const Shape&)>;
AttentionSaved alloc_attention(const ModelConfig&, int64_t layer, int64_t B, int64_t T, int64_t row_tokens, DType dtype,
                               const AllocTensor& kept, const AllocTensor& alloc);

// Returns out [B,T,Hq,dv] T, out_proj's input: allocated in scope, or a tensor of `saved`, which is overwritten.
Tensor attend_forward(Context&, const LayerContext&, const NsaWeights&, const QkvViews& in, const AttentionSaved& saved,
                      Scratch::Scope&);

// Tensors in the memory passed to attend_backward; `out` may be a `saved` tensor instead.
struct AttentionGrads {
  Tensor dq, dq_group;  // see NsaGrad; dense: dq_group is absent
  Tensor out;           // attend_forward's result
  Tensor index_dq;      // [B,T,Hkv,d_index] acc; absent without a taught index
};
// Backward for dout [B,T,Hq,dv] T: overwrites the gradients of k and v in din, adds those of the weights. A taught
// index's keys' gradient is in din too. A pair that the branches share gets their summed gradients (nsa/branch_sum.h).
AttentionGrads attend_backward(Context&, const LayerContext&, const QkvViews& din, const NsaWeightGrads& dw,
                               ConstTensor dout, const QkvViews& in, const AttentionSaved& saved, const NsaWeights& w,
                               UnusedMemory&);

}  // namespace triad
