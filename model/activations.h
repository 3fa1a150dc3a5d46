// The tensors that a forward pass keeps for backward: everything that backward reads, except what it can rebuild
// elementwise (normed rows, the activation's output, the gated sum). Tensors of layers that recompute them share one
// set of buffers, which backward refills layer by layer. Allocated once for a fixed B and T.
#pragma once
#include <vector>

#include "engine/context.h"
#include "model/config.h"
#include "model/recompute.h"

namespace triad {

// The largest number of sequences per batch. A CUDA grid has at most 65,535 CTAs along y and z, where attention kernels
// use sequences * groups.
int64_t most_sequences(Device, const ModelConfig&);
void check_sequences(Device, const ModelConfig&, int64_t B);

struct LayerActivations {
  Tensor x;  // [N,C] T: the layer's input, written by the layer before
  Tensor rrms1, rrms2;
  Tensor qkv;      // [N, rows of the fused projection] T; q and the keys rotated
  NsaSaved nsa;    // dense attention uses o[win] and lse[win] only
  Tensor x_mid;    // [N,C] T: after attention
  Tensor mlp_pre;  // [N,H] or [N,2H] T: before the activation
};

class Activations {
 public:
  // keep: every layer has its own tensors, for backward. Otherwise layers alternate between two sets: forward only.
  Activations(Arena&, const ModelConfig&, int64_t B, int64_t T, DType dtype, bool keep, const RecomputePlan& = {});

  int64_t B() const { return tokens.size(0); }
  int64_t T() const { return tokens.size(1); }
  int64_t rows() const { return B() * T(); }
  Recompute recompute(int64_t i) const { return recompute_.of(i); }
  LayerActivations& layer(int64_t i) { return layers_[static_cast<size_t>(i) % layers_.size()]; }
  // The input of layer i; for i = n_layers, the input of the final norm.
  Tensor x(int64_t i) { return i < n_layers_ ? layer(i).x : x_final_; }

  Tensor tokens, targets;  // [B,T] i32
  Tensor rrms_final;
  Tensor row_loss;

 private:
  int64_t n_layers_;
  RecomputePlan recompute_;
  Tensor x_final_;  // [N,C] T
  std::vector<LayerActivations> layers_;
};

// Views of q and the branches' k and v in the rows of the fused projection (activations or gradients).
struct QkvViews {
  Tensor q;                    // [B,T,Hq,dk]
  std::array<Tensor, 3> k, v;  // [B,T,Hkv,dk], [B,T,Hkv,dv]; dense: win only
};
QkvViews split_qkv(const Tensor& qkv, const ModelConfig&, int64_t B, int64_t T);
int64_t qkv_width(const ModelConfig&);

}  // namespace triad
