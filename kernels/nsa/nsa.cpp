// NSA with the gate MLP and phi: the composition steps (nsa/compose.h) that have parameters.
#include "kernels/nsa/nsa.h"

#include "kernels/nsa/compose.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp);

NsaComposition composition(const NsaConfig& c, bool keep_block_index) {
  NsaComposition composition{c};
  composition.w = c.w;
  composition.keep_block_index = keep_block_index;
  return composition;
}

}  // namespace

void nsa_forward(Context& ctx, Tensor out, const NsaSaved& s, const NsaIn& in, const NsaWeights& w, const NsaConfig& c,
                 bool keep_block_index) {
  nsa_compose_forward(ctx, out, s, in, composition(c, keep_block_index),
                      {.gate = [&](Context& on) { nsa_gate_forward(on, s.gate, in.q, w.gate, c.gate); },
                       .compress =
                           [&](Context& on) {
                             nsa_compress_forward(on, s.k_cmp, in.k[kCmp], w.phi_k, c.phi_options(), in.documents);
                             nsa_compress_forward(on, s.v_cmp, in.v[kCmp], w.phi_v, c.phi_options(), in.documents);
                           }});
}

void nsa_backward(Context& ctx, const NsaGrad& grad, const NsaWeightGrads& dw, ConstTensor dout, const NsaIn& in,
                  const NsaSaved& s, const NsaWeights& w, const NsaConfig& c) {
  const auto gate_backward = [&](Context& on, ConstTensor dgate) {
    nsa_gate_backward(on, grad.dq_group, dw.gate, dgate, s.gate, in.q, w.gate, c.gate);
  };
  const auto compress_backward = [&](Context& on, ConstTensor dk, ConstTensor dv) {
    nsa_compress_backward(on, grad.k[kCmp], dw.phi_k, dk, in.k[kCmp], w.phi_k, c.phi_options(), in.documents);
    nsa_compress_backward(on, grad.v[kCmp], dw.phi_v, dv, in.v[kCmp], w.phi_v, c.phi_options(), in.documents);
  };
  nsa_compose_backward(ctx, grad, dout, in, s, composition(c, false),
                       {.gate = gate_backward, .compress = compress_backward, .compress_on_side = c.phi != Phi::mlp});
}

}  // namespace triad
