// Queues NSA's ops in dependency order. It contains no arithmetic.
#include "kernels/nsa/compose.h"

#include <optional>

#include "engine/fork_join.h"
#include "kernels/nsa/gate_factors.h"
#include "kernels/nsa/select_index.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

}  // namespace

// The critical path is compress, compressed branch, selection, selected branch; its kernels have the highest priority
// (engine/context.cpp). The gate needs only q, and the window only q, k and v, so they run concurrently on side
// streams. The window starts after compress: its CTAs fill the SMs, and compress's and the gate's short kernels would
// wait for them. If the selected branch's kernel can compute the gated sum in its epilogue, the window and the gate
// have to finish before it starts.
void nsa_compose_forward(Context& ctx, Tensor out, const NsaSaved& s, const NsaIn& in, const NsaComposition& c,
                         const NsaForwardSteps& steps) {
  std::optional<ForkJoin> gate;
  if (steps.gate) gate.emplace(ctx, 2, steps.gate);
  steps.compress(ctx);
  ForkJoin window(ctx, 0, [&](Context& side) {
    nsa_attend_window_forward(side, {s.o[kWin], s.lse[kWin]}, {in.q, in.k[kWin], in.v[kWin], in.documents}, c.w);
  });
  nsa_attend_compressed_forward(ctx, {s.o[kCmp], s.lse[kCmp]}, {in.q, s.k_cmp, s.v_cmp, in.documents}, c);
  if (!c.keep_block_index) {
    if (in.index.q.empty())
      nsa_select(ctx, s.block_index, in.q, s.k_cmp, s.lse[kCmp], c, in.documents);
    else
      nsa_select_index(ctx, s.block_index, in.index.q, in.index.k, c, in.documents);
  }
  const IndexForward taught{in.index, s.index_lse};
  const IndexForward* const index = s.index_lse.empty() ? nullptr : &taught;
  const AttendOut selected{s.o[kSel], s.lse[kSel]};
  const AttendIn selected_in{in.q, in.k[kSel], in.v[kSel], in.documents};
  const CombineAlong combine{out, s.o[kCmp], s.o[kWin], s.gate};
  const auto join = [&] {
    if (gate) gate->join();
    window.join();
  };
  const bool gate_per_group = s.gate.size(3) == in.k[kSel].size(2);
  if (gate_per_group && nsa_attend_selected_combines(ctx, selected, selected_in, s.block_index, c.l_sel, combine)) {
    join();
    nsa_attend_selected_forward(ctx, selected, selected_in, s.block_index, c.l_sel, &combine, index);
  } else {
    nsa_attend_selected_forward(ctx, selected, selected_in, s.block_index, c.l_sel, nullptr, index);
    join();
    nsa_combine_forward(ctx, out, {s.o[kCmp], s.o[kSel], s.o[kWin]}, s.gate);
  }
}

// With a rounding unit the branches may add to dq in any order, hence concurrently; without it the ForkJoins run in
// sequence. The selected branch, the longest, has the highest priority. The small kernels (inverse index, partial sums,
// phi and gate gradients) overlap with it.
void nsa_compose_backward(Context& ctx, const NsaGrad& grad, ConstTensor dout, const NsaIn& in, const NsaSaved& s,
                          const NsaComposition& c, const NsaBackwardSteps& steps) {
  const DType acc = acc_dtype(in.q.dtype);
  const int64_t B = in.q.size(0), T = in.q.size(1), Hq = in.q.size(2), Hkv = in.k[kSel].size(2);
  Scratch::Scope scope(ctx.scratch);
  const Tensor dgate = scope.alloc(acc, s.gate.shape()), delta = scope.alloc(acc, {3, B, T, Hq});
  const Tensor dout_norm = scope.alloc(acc, {B, T, Hq});
  const Tensor dk_cmp = scope.alloc(acc, s.k_cmp.shape()), dv_cmp = scope.alloc(acc, s.v_cmp.shape());
  // Branch b's upstream gradient is gate_b * dout. The branches' kernels multiply by a gate per group themselves; for
  // other gates the product is computed first, and gate_bounds replaces the gates in the bound on dq's terms.
  const bool gated_apart = c.signed_gates || s.gate.size(3) != Hkv;
  std::array<Tensor, 3> gated;  // gate_b * dout
  Tensor gate_bounds = s.gate;
  if (gated_apart) {
    for (Tensor& t : gated) t = scope.alloc(dout.dtype, {B, T, Hq, dout.size(3)});
    gate_bounds = scope.alloc(acc, {3, B, T, Hkv});
  }
  const std::vector<RoundingUnitBranch> rounding_unit_branches = {
      {s.k_cmp, s.v_cmp, gate_bounds[kCmp], delta[kCmp], c.d},
      {in.k[kSel], in.v[kSel], gate_bounds[kSel], delta[kSel]},
      {in.k[kWin], in.v[kWin], gate_bounds[kWin], delta[kWin]}};
  const ConstTensor branch_dout = gated_apart ? ConstTensor(gated[kCmp]) : dout;  // same shape and strides for all
                                                                                  // branches
  const Tensor key_norms = scope.alloc(acc, key_norms_shape(rounding_unit_branches, in.documents));
  ForkJoin clearing(ctx, 0, [&](Context& side) {
    zero(side, grad.dq);  // every branch adds to dq
    attend_key_norms(side, key_norms, grad.dq, branch_dout, in.q, rounding_unit_branches, in.documents);
  });
  if (gated_apart) nsa_gate_dout(ctx, gated, gate_bounds, dout, s.gate);
  nsa_combine_backward(ctx, dgate, delta, dout, {s.o[kCmp], s.o[kSel], s.o[kWin]}, s.gate, grad.out, dout_norm);
  clearing.join();
  const Tensor rounding_unit = attend_rounding_unit(ctx, scope, grad.dq, branch_dout, in.q, rounding_unit_branches,
                                                    dout_norm, key_norms, in.documents);
  auto upstream = [&](int branch) {
    if (gated_apart) return AttendGradIn{gated[branch], {}, delta[branch], s.lse[branch], rounding_unit};
    return AttendGradIn{dout, s.gate[branch], delta[branch], s.lse[branch], rounding_unit};
  };

  const bool any_order = !rounding_unit.empty();
  ForkJoin window(
      ctx, 0,
      [&](Context& side) {
        nsa_attend_window_backward(side, {grad.dq, grad.k[kWin], grad.v[kWin]}, upstream(kWin),
                                   {in.q, in.k[kWin], in.v[kWin], in.documents}, c.w);
      },
      any_order);
  ForkJoin compressed(
      ctx, 1,
      [&](Context& side) {
        nsa_attend_compressed_backward(side, {grad.dq, dk_cmp, dv_cmp}, upstream(kCmp),
                                       {in.q, s.k_cmp, s.v_cmp, in.documents}, c);
        steps.gate(side, dgate);
        if (steps.compress_on_side) steps.compress(side, dk_cmp, dv_cmp);
      },
      any_order);
  nsa_attend_selected_backward(ctx, {grad.dq, grad.k[kSel], grad.v[kSel]}, upstream(kSel),
                               {in.q, in.k[kSel], in.v[kSel], in.documents}, s.block_index, c.l_sel, grad.index);
  compressed.join();
  if (!steps.compress_on_side) steps.compress(ctx, dk_cmp, dv_cmp);
  window.join();
}

}  // namespace triad
