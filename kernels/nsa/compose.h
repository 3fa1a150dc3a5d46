// The composition of NSA: in which order, and on which streams, the branches, the selection and the gated sum run. How
// gates and compressed keys are made is the caller's: nsa.cpp (the gate MLP, phi) and kernels/library (a caller's
// factors, averages or given keys) pass it as steps.
#pragma once
#include <functional>

#include "kernels/nsa/nsa.h"

namespace triad {

// Gates are [3,B,T,H] acc, H being Hkv (one gate for all heads of a group) or Hq (one per head); everywhere below, the
// branches' tensors are those of NsaIn, NsaSaved and NsaGrad.
struct NsaForwardSteps {
  std::function<void(Context&)> gate;      // fills saved.gate
  std::function<void(Context&)> compress;  // fills saved.k_cmp and v_cmp
};
struct NsaBackwardSteps {
  // Consumes dgate, in the shape of saved.gate.
  std::function<void(Context&, ConstTensor dgate)> gate;
  // Consumes the gradients of saved.k_cmp and v_cmp, in acc.
  std::function<void(Context&, ConstTensor dk_cmp, ConstTensor dv_cmp)> compress;
  bool compress_on_side = true;  // false: compress multiplies matrices, which a side stream must not
};

// Options of the composition.
struct NsaComposition : SelectOptions {
  int64_t w = 512;
  bool keep_block_index = false;  // forward: saved.block_index is an input and the selection is skipped
  // Whether gates may be negative. Hopper's backward kernels take the logarithm of a branch's gate, so backward then
  // multiplies dout by the gates first, as it does for gates per head (nsa/gate_factors.h): three more copies of dout.
  bool signed_gates = false;
};

// out and saved as in nsa_forward.
void nsa_compose_forward(Context&, Tensor out, const NsaSaved& saved, const NsaIn&, const NsaComposition&,
                         const NsaForwardSteps&);
// grad as in nsa_backward, except for what the steps write: dq_group and the gradients of the compressed branch's k, v.
void nsa_compose_backward(Context&, const NsaGrad& grad, ConstTensor dout, const NsaIn&, const NsaSaved&,
                          const NsaComposition&, const NsaBackwardSteps&);

}  // namespace triad
