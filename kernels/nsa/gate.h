// NSA's gates (paper Eq. 5), one triple (cmp, sel, win) per token and group, and the branches' gated sum.
//   z = (fc2(SiLU(fc1(q averaged over the group's heads) + b1)) + b2) / temperature;  gate = softmax(z) or sigmoid(z)
//   out[h] = sum over branches b of gate_b[g(h)] * o_b[h]
// Gates are stored as [3,B,T,Hkv], so that each branch's gates are contiguous.
#pragma once
#include <array>

#include "engine/context.h"

namespace triad {

enum class GateKind { softmax, sigmoid };
enum class Branch { none = -1, cmp = 0, sel = 1, win = 2 };

struct GateOptions {
  GateKind kind = GateKind::softmax;
  double temperature = 1.0;
  Branch force = Branch::none;  // this branch's gate is 1, the others are 0; no gradient into the gate
  bool uniform = false;         // every gate is 1/3; no gradient into the gate
  bool stop_gradient = false;   // gates are computed as usual; no gradient into the gate
  bool has_gradient() const { return force == Branch::none && !uniform && !stop_gradient; }
};
template <class TensorType>
struct GateTensors {
  TensorType fc1_w, fc1_b, fc2_w, fc2_b;  // [dk/2,dk], [dk/2], [3,dk/2], [3]
};
using GateWeights = GateTensors<ConstTensor>;  // T
using GateGrads = GateTensors<Tensor>;         // acc, added to

// Computes the three branches' gates from the mean of each group's rotated queries.
// gate [3,B,T,Hkv] acc overwritten  <-  q [B,T,Hq,dk] T
void nsa_gate_forward(Context&, Tensor gate, ConstTensor q, const GateWeights&, const GateOptions&);
// dq_group [B,T,Hkv,dk] acc overwritten: the gate's term in dq for each of the group's heads, the gradient at the
// heads' mean divided by G; zero if !options.has_gradient(). Weight gradients added to  <-  dgate, gate [3,B,T,Hkv]
// acc, q as in forward.
void nsa_gate_backward(Context&, Tensor dq_group, const GateGrads&, ConstTensor dgate, ConstTensor gate, ConstTensor q,
                       const GateWeights&, const GateOptions&);

// out [B,T,Hq,dv] T overwritten  <-  o: three branches, each [B,T,Hq,dv] T, gate [3,B,T,Hkv] acc
void nsa_combine_forward(Context&, Tensor out, const std::array<ConstTensor, 3>& o, ConstTensor gate);
// Arguments for the same sum in the epilogue of the selected branch's kernel (nsa/attend_selected.h).
struct CombineAlong {
  Tensor out;
  ConstTensor o_cmp, o_win, gate;
};
// dgate [3,B,T,Hkv] acc, delta [3,B,T,Hq] acc overwritten  <-  dout [B,T,Hq,dv] T, o, gate. With a_b = rowsum(dout
// o_b): dgate_b = a_b summed over the group's heads, delta_b = gate_b * a_b (AttendGradIn::delta). out [B,T,Hq,dv] T,
// if given, is overwritten with forward's result, bit for bit: out_proj's gradient needs it, and this pass reads the
// branches' o anyway. dout_norm [B,T,Hq] acc, if given, is overwritten with |dout[h]| for attend_rounding_unit.
void nsa_combine_backward(Context&, Tensor dgate, Tensor delta, ConstTensor dout, const std::array<ConstTensor, 3>& o,
                          ConstTensor gate, Tensor out = {}, Tensor dout_norm = {});
// delta [B,T,Hq] acc overwritten  <-  rowsum(dout o), both [B,T,Hq,dv] T: for attention without a gate.
// dout_norm as in nsa_combine_backward.
void attention_delta(Context&, Tensor delta, ConstTensor dout, ConstTensor o, Tensor dout_norm = {});

namespace cuda {
void nsa_gate_forward(Context&, Tensor gate, ConstTensor q, const GateWeights&, const GateOptions&);
void nsa_gate_backward(Context&, Tensor dq_group, const GateGrads&, ConstTensor dgate, ConstTensor gate, ConstTensor q,
                       const GateWeights&, const GateOptions&);
void nsa_combine_forward(Context&, Tensor out, const std::array<ConstTensor, 3>& o, ConstTensor gate);
void nsa_combine_backward(Context&, Tensor dgate, Tensor delta, ConstTensor dout, const std::array<ConstTensor, 3>& o,
                          ConstTensor gate, Tensor out, Tensor dout_norm);
void attention_delta(Context&, Tensor delta, ConstTensor dout, ConstTensor o, Tensor dout_norm);
}  // namespace cuda
}  // namespace triad
