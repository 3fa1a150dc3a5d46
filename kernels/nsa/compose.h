// NSA's composition: in which order, and on which streams, the branches, the selection and the gated sum run. The
// caller passes functions that compute the gates and the compressed keys and values: nsa.cpp passes the gate MLP and
// phi; kernels/library passes functions that take the gates from its user, and average keys and values or take
// compressed ones.
#pragma once
#include <functional>

#include "kernels/nsa/nsa.h"

namespace triad {

// The caller's functions. Gates are [3,B,T,H] acc, where H is Hkv (one gate for all the group's heads) or Hq (one per
// head). NsaIn, NsaSaved and NsaGrad describe the other tensors.
struct NsaForwardSteps {
  std::function<void(Context&)> gate;      // fills saved.gate; absent if compress does that too
  std::function<void(Context&)> compress;  // fills saved.k_cmp and v_cmp
};
struct NsaBackwardSteps {
  // Computes the caller's gradients from dgate, shaped like saved.gate.
  std::function<void(Context&, ConstTensor dgate)> gate;
  // Computes the caller's gradients from saved.k_cmp's and v_cmp's, in acc.
  std::function<void(Context&, ConstTensor dk_cmp, ConstTensor dv_cmp)> compress;
  bool compress_on_side = true;  // false if compress has matrix products: these must not run on a side stream
};

// Composition options.
struct NsaComposition : SelectOptions {
  int64_t w = 512;
  bool keep_block_index = false;  // forward: saved.block_index is an input and the selection is skipped
  // Whether gates may be negative. Hopper's backward kernels take the logarithm of a branch's gate. If true, backward
  // multiplies dout by the gates first, as for gates per head (nsa/gate_factors.h), and needs three copies of dout.
  bool signed_gates = false;
};

// Overwrites out and saved, as nsa_forward does.
void nsa_compose_forward(Context&, Tensor out, const NsaSaved& saved, const NsaIn&, const NsaComposition&,
                         const NsaForwardSteps&);
// Overwrites grad as nsa_backward does, except what the steps write: dq_group and the compressed branch's k and v
// gradients.
void nsa_compose_backward(Context&, const NsaGrad& grad, ConstTensor dout, const NsaIn&, const NsaSaved&,
                          const NsaComposition&, const NsaBackwardSteps&);

}  // namespace triad
