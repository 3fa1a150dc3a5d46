// The tensors that a forward pass keeps for backward: everything that backward reads, except what it can compute again
// element by element while it computes gradients (normed rows, the activation's output, the gated sum). Layers that
// recompute a tensor share one buffer for it, which backward refills layer by layer. Allocated once for a fixed batch
// size B and sequence length T.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/context.h"
#include "kernels/nsa/document_tables.h"
#include "model/attention.h"
#include "model/recompute.h"

namespace triad {

// The most sequences per batch. It's limited on a GPU, because a CUDA grid has at most 65,535 CTAs along y and z, along
// which attention kernels place sequences * groups.
int64_t most_sequences(Device, const ModelConfig&);
void check_sequences(Device, const ModelConfig&, int64_t B);

struct LayerActivations {
  Tensor x;  // [N,C]: the layer's input, which the previous layer writes
  Tensor rrms1, rrms2;
  Tensor qkv;    // [N, rows of the fused projection]: q, k and v; without model.qk_norm, q and k are rotated in place
  Tensor index;  // [N, index_width], with a taught index: its queries and keys, rotated in place as those in qkv
  Tensor index_qk;  // [N, index_width]: with model.qk_norm, as qk
  Tensor qk;  // [N, qk_width]: with model.qk_norm, q and k after norm and rotation; qkv then keeps the projected ones
  AttentionSaved attention;
  Tensor x_mid;    // [N,C]: the sum after attention
  Tensor mlp_pre;  // [N,H], for swiglu [N,2H]: the MLP before its activation
};

// Views that attention reads: q and k normed (with model.qk_norm) and rotated.
QkvViews attended_qkv(const LayerActivations&, const ModelConfig&, AttentionKind, int64_t B, int64_t T);

class Activations {
 public:
  // keep: if true, every layer has its own tensors, as backward needs; otherwise layers alternate between two sets,
  // which is enough for forward alone. A set has tensors for each layer kind (dense, NSA) that it serves.
  // most_documents: the most documents in a row; 0: every row is one document. layout: which tokens this rank has of
  // T-token sequences; by default all.
  Activations(Arena&, const ModelConfig&, int64_t B, int64_t T, DType dtype, bool keep, const RecomputePlan& = {},
              int64_t most_documents = 0, const SequenceLayout& layout = {});
  // The same with another source of memory than an arena. layer: the layer whose backward is the last that uses the
  // tensor; the number of layers for the input of the final norm; kNoLayer for tensors that have no such layer. The
  // calls with layers are in descending order.
  static constexpr int64_t kNoLayer = -1;
  using AllocActivation = std::function<Tensor(MemTag, const std::string& name, DType, const Shape&, int64_t layer)>;
  Activations(const AllocActivation&, const ModelConfig&, int64_t B, int64_t T, DType dtype, bool keep,
              const RecomputePlan&, int64_t most_documents, const SequenceLayout& layout);

  int64_t B() const { return tokens.size(0); }
  int64_t T() const { return tokens.size(1); }  // tokens of a sequence that this rank has
  const SequenceLayout& layout() const { return layout_; }
  int64_t rows() const { return B() * T(); }
  const RecomputePlan& recompute() const { return recompute_; }
  LayerActivations& layer(int64_t i) { return layers_[static_cast<size_t>(i)]; }
  // The input of layer i; for i = n_layers, the final norm's input.
  Tensor x(int64_t i) { return i < n_layers_ ? layer(i).x : x_final_; }

  Tensor tokens, targets;  // [B,T] i32
  // [B] i32, with a taught index: the first padded token of each sequence, whose rows teach nothing from there on; the
  // number of tokens if there is none.
  Tensor padding_begin;
  // For packed rows; absent if every row is one document. [B * most_documents + 1] i32: document bounds in all
  // sequences' tokens, then the document count. Bounds and tables are for whole sequences, with layout().tokens()
  // tokens each.
  Tensor bounds;
  // By l_sel, as the layers' selection blocks differ; filled from `bounds` by Model::forward. Empty without `bounds`.
  std::map<int64_t, DocumentTables> documents;
  // A layer's tables; layer -1: any layer's, for what does not depend on l_sel. Absent ones without `bounds`.
  DocumentTables documents_of(int64_t layer) const;
  Tensor rrms_final;
  Tensor row_loss;

 private:
  int64_t n_layers_;
  std::vector<int64_t> l_sel_;  // tokens of a selection block, by layer
  SequenceLayout layout_;
  RecomputePlan recompute_;
  Tensor x_final_;  // [N,C] in the compute dtype
  std::vector<LayerActivations> layers_;
};

// Memory for several Activations that are used in turn: tensors with the same name share memory, as much as the largest
// needs.
class ActivationMemory {
 public:
  explicit ActivationMemory(Activations::AllocActivation source) : source_(std::move(source)) {}
  // Records a planned arena's allocations, in which such Activations were constructed. Call for all before take().
  void reserve(const Arena& planned);
  Tensor take(MemTag, const std::string& name, DType, const Shape&, int64_t layer);

 private:
  struct Largest {
    Arena::Allocation allocation;
    Tensor memory;  // empty until the first take()
  };
  Activations::AllocActivation source_;
  std::map<std::string, Largest> by_name_;
};

}  // namespace triad
