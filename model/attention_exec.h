// AttentionExec: how the attention of a layer is computed, chosen once for a model: by a rank that holds whole
// sequences (whole_sequences()), or by a group of ranks that shares each of them (sequence/attention.h).
#pragma once
#include <memory>

#include "model/layer_context.h"
#include "model/qkv_views.h"

namespace triad {

class AttentionExec {
 public:
  virtual ~AttentionExec() = default;
  // The functions of nsa.h, dense_attention.h, selected_attention.h and window_attention.h. in: this rank's tokens.
  // Gradients of k and v are overwritten, those of weights added to. index: what is computed for a taught index, for
  // this rank's tokens; null: nothing.
  virtual void nsa_forward(Context&, const LayerContext&, Tensor out, const NsaSaved&, const QkvViews& in,
                           const NsaWeights&) const = 0;
  virtual void nsa_backward(Context&, const LayerContext&, const NsaGrad&, const NsaWeightGrads& dw, ConstTensor dout,
                            const QkvViews& in, const NsaSaved&, const NsaWeights&) const = 0;
  virtual void dense_forward(Context&, const LayerContext&, const DenseSaved&, const QkvViews& in,
                             const IndexForward* index) const = 0;
  virtual void dense_backward(Context&, const LayerContext&, const DenseGrad&, ConstTensor dout, const QkvViews& in,
                              const DenseSaved&, const IndexBackward* index) const = 0;
  virtual void selected_forward(Context&, const LayerContext&, const SelectedSaved&, const QkvViews& in) const = 0;
  virtual void selected_backward(Context&, const LayerContext&, const DenseGrad&, ConstTensor dout, const QkvViews& in,
                                 const SelectedSaved&, const IndexBackward* index) const = 0;
  virtual void window_forward(Context&, const LayerContext&, const DenseSaved&, const QkvViews& in) const = 0;
  virtual void window_backward(Context&, const LayerContext&, const DenseGrad&, ConstTensor dout, const QkvViews& in,
                               const DenseSaved&) const = 0;
};

std::unique_ptr<const AttentionExec> whole_sequences();

}  // namespace triad
