// The order in which the six ops make NSA; no arithmetic of its own.
#include "kernels/nsa.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

PhiOptions phi_options(const NsaConfig& c) { return {c.phi, c.l, c.d}; }

}  // namespace

void nsa_forward(Context& ctx, Tensor out, const NsaSaved& s, const NsaIn& in, const NsaWeights& w, const NsaConfig& c,
                 bool keep_block_index) {
  nsa_compress_forward(ctx, s.k_cmp, in.k[kCmp], w.phi_k, phi_options(c));
  nsa_compress_forward(ctx, s.v_cmp, in.v[kCmp], w.phi_v, phi_options(c));
  nsa_attend_compressed_forward(ctx, {s.o[kCmp], s.lse[kCmp]}, {in.q, s.k_cmp, s.v_cmp}, {c.l, c.d});
  if (!keep_block_index)
    nsa_select(ctx, s.block_index, in.q, s.k_cmp, s.lse[kCmp],
               {c.l, c.d, c.l_sel, c.n_sel, c.init_blocks, c.local_blocks});
  nsa_attend_selected_forward(ctx, {s.o[kSel], s.lse[kSel]}, {in.q, in.k[kSel], in.v[kSel]}, s.block_index, c.l_sel);
  nsa_attend_window_forward(ctx, {s.o[kWin], s.lse[kWin]}, {in.q, in.k[kWin], in.v[kWin]}, c.w);
  nsa_gate_forward(ctx, s.gate, in.q, w.gate, c.gate);
  nsa_combine_forward(ctx, out, {s.o[kCmp], s.o[kSel], s.o[kWin]}, s.gate);
}

void nsa_backward(Context& ctx, const NsaGrad& grad, const NsaWeightGrads& dw, ConstTensor dout, const NsaIn& in,
                  const NsaSaved& s, const NsaWeights& w, const NsaConfig& c) {
  const DType acc = acc_dtype(in.q.dtype);
  Scratch::Scope scope(ctx.scratch);
  const Tensor dgate = scope.alloc(acc, s.gate.shape());
  const Tensor delta = scope.alloc(acc, {3, in.q.size(0), in.q.size(1), in.q.size(2)});
  nsa_combine_backward(ctx, dgate, delta, dout, {s.o[kCmp], s.o[kSel], s.o[kWin]}, s.gate, grad.out);
  nsa_gate_backward(ctx, grad.dq_group, dw.gate, dgate, s.gate, in.q, w.gate, c.gate);

  zero(ctx, grad.dq);  // each branch adds its share
  const Tensor quantum = attend_quantum(ctx, scope, grad.dq, dout, in.q,
                                        {{s.k_cmp, s.v_cmp, s.gate[kCmp], delta[kCmp]},
                                         {in.k[kSel], in.v[kSel], s.gate[kSel], delta[kSel]},
                                         {in.k[kWin], in.v[kWin], s.gate[kWin], delta[kWin]}});
  auto upstream = [&](int branch) { return AttendGradIn{dout, s.gate[branch], delta[branch], s.lse[branch], quantum}; };
  {
    Scratch::Scope inner(ctx.scratch);
    const Tensor dk_cmp = inner.alloc(acc, s.k_cmp.shape()), dv_cmp = inner.alloc(acc, s.v_cmp.shape());
    nsa_attend_compressed_backward(ctx, {grad.dq, dk_cmp, dv_cmp}, upstream(kCmp), {in.q, s.k_cmp, s.v_cmp},
                                   {c.l, c.d});
    nsa_compress_backward(ctx, grad.k[kCmp], dw.phi_k, dk_cmp, in.k[kCmp], w.phi_k, phi_options(c));
    nsa_compress_backward(ctx, grad.v[kCmp], dw.phi_v, dv_cmp, in.v[kCmp], w.phi_v, phi_options(c));
  }
  nsa_attend_selected_backward(ctx, {grad.dq, grad.k[kSel], grad.v[kSel]}, upstream(kSel),
                               {in.q, in.k[kSel], in.v[kSel]}, s.block_index, c.l_sel);
  nsa_attend_window_backward(ctx, {grad.dq, grad.k[kWin], grad.v[kWin]}, upstream(kWin), {in.q, in.k[kWin], in.v[kWin]},
                             c.w);
}

}  // namespace triad
