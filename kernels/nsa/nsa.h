// Native Sparse Attention (arXiv 2502.11089), composed from six ops: compress, attend compressed, select, attend
// selected, attend window, gate. This folder's README.md has the equations.
//   out[h] = sum over branches b of gate_b[g(h)] * o_b[h],   o_b = softmax attention over branch b's keys
// Inputs q and k are already rotated (RoPE); the caller multiplies out by out_proj. T is q's dtype (bf16, f32 or f64)
// and acc its accumulator type (f32, or f64 for f64).
#pragma once
#include <array>
#include <vector>

#include "kernels/nsa/attend_compressed.h"
#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/attend_window.h"
#include "kernels/nsa/compress.h"
#include "kernels/nsa/gate.h"
#include "kernels/nsa/index.h"
#include "kernels/nsa/select.h"

namespace triad {

// What chooses the selected blocks: the compressed branch's probabilities, or a taught index.
enum class Selector { compressed, index };
// The branches of attention: NSA's three with gates; the selected one alone (nsa/selected_attention.h); or the window
// alone (nsa/window_attention.h).
enum class Branches { all, selected, window };

// The bases are the compression and selection options, so you can pass an NsaConfig to these ops.
struct NsaConfig : SelectOptions {
  int64_t w = 512;  // tokens of the sliding window
  Phi phi = Phi::avg;
  GateOptions gate;
  // For a model, not for the ops: the gates with which fresh weights begin, in the order of Branch (empty: equal
  // gates); whether the branches share one k and one v; the selector, the width of its index, and the weight of the
  // index's loss in the objective; the branches.
  std::vector<double> gate_init;
  bool shared_kv = false;
  Selector selector = Selector::compressed;
  int64_t d_index = 64;
  double index_loss = 1;
  Branches branches = Branches::all;

  PhiOptions phi_options() const { return {*this, phi}; }
};

template <class TensorType>
struct NsaWeightTensors {
  PhiTensors<TensorType> phi_k, phi_v;
  GateTensors<TensorType> gate;
};
using NsaWeights = NsaWeightTensors<ConstTensor>;
using NsaWeightGrads = NsaWeightTensors<Tensor>;

// k and v are indexed by Branch: cmp (raw, not yet compressed), sel, win.
struct NsaIn {
  ConstTensor q;                    // [B,T,Hq,dk] T
  std::array<ConstTensor, 3> k, v;  // [B,T,Hkv,dk], [B,T,Hkv,dv] T
  Documents documents = {};         // packed rows' tables
  IndexIn index = {};               // if given, it selects, and not the compressed branch
};
// What forward saves for backward. block_index is a constant in backward: no gradient flows through the selection.
struct NsaSaved {
  Tensor k_cmp, v_cmp;           // [B,Tc,Hkv,dk], [B,Tc,Hkv,dv] T
  Tensor block_index;            // [B,T,Hkv,n] i32
  Tensor gate;                   // [3,B,T,Hkv] acc
  std::array<Tensor, 3> o, lse;  // [B,T,Hq,dv] T, [B,T,Hq] acc
  Tensor index_lse = {};         // [B,T,Hkv] acc; the index's lse; absent unless a branch teaches it
};
// All overwritten. Head h's query gradient is dq[h] + dq_group[h / G]. The consumer (rope_backward) adds the two parts,
// which saves a pass over dq.
struct NsaGrad {
  Tensor dq;                             // [B,T,Hq,dk] acc; gradient through the branches
  Tensor dq_group;                       // [B,T,Hkv,dk] acc; gradient through the gates
  std::array<Tensor, 3> k, v;            // gradients for NsaIn::k and v, shaped like them
  Tensor out;                            // [B,T,Hq,dv] T, optional: forward's out, recomputed bit for bit
  const IndexBackward* index = nullptr;  // gradients for the index that the selected branch teaches; null: none
};

// out [B,T,Hq,dv] T and everything in saved are overwritten. keep_block_index: saved.block_index is an input and the
// selection is skipped, for finite differences, which need constant lists.
void nsa_forward(Context&, Tensor out, const NsaSaved& saved, const NsaIn&, const NsaWeights&, const NsaConfig&,
                 bool keep_block_index = false);
// grad is overwritten and weight gradients are added to  <-  dout [B,T,Hq,dv] T
void nsa_backward(Context&, const NsaGrad& grad, const NsaWeightGrads&, ConstTensor dout, const NsaIn&, const NsaSaved&,
                  const NsaWeights&, const NsaConfig&);

}  // namespace triad
