// Shared by the case tables (*_cases.cpp) for the three attention branches and dense attention: how a branch's case
// runs backward, with and without a rounding unit for dq (attend_rounding_unit() in nsa/attend.h).
#pragma once
#include <utility>

#include "kernels/nsa/attend.h"
#include "kernels/nsa/cases/document_cases.h"
#include "kernels/nsa/gate.h"
#include "kernels/ops/rope.h"

namespace triad {

// Changes a case whose first argument is q: dq becomes a tensor in the case's dtype that backward overwrites. The
// case's backward must compute dq in the acc dtype, in scratch memory, and then call round_dq(), which writes dq. The
// case gets the arguments "one" and "zero", cosine and sine tables [T, dk / 2], which round_dq() uses.
inline void use_rounded_dq(OpCase& c) {
  Arg& q = c.args.front();
  const Shape angles = {q.shape[1], q.shape[3] / 2};
  q.role = ArgRole::input;
  c.args.push_back(
      {.name = "one", .role = ArgRole::constant, .shape = angles, .type = ArgType::acc, .std = 0, .mean = 1});
  c.args.push_back({.name = "zero", .role = ArgRole::constant, .shape = angles, .type = ArgType::acc, .std = 0});
}
// Writes dq_acc [B,T,Hq,dk], in the acc dtype, to the case's dq, rounded to dq's dtype, by a rotation through the angle
// zero.
inline void round_dq(Context& ctx, const Args& a, const Tensor& dq_acc) {
  rope_backward(ctx, a["dq"], dq_acc, a["one"], a["zero"]);
}

// Returns the case with a rounding unit for dq in backward, as a training step has. On the GPU in bf16, one kernel then
// computes dq, dk and dv. There is no such kernel for f32 or on the CPU. The case is therefore tested on the GPU only,
// in bf16, and compared with the CPU's results.
inline OpCase with_rounding_unit(OpCase c) {
  c.name += "_unit";
  use_rounded_dq(c);
  c.gpu_f32 = c.cpu = c.differences = false;
  return c;
}

// Runs backward for one branch's case, without a gate: computes delta and calls backward(AttendGradOut, AttendGradIn,
// AttendIn). If with_rounding_unit() made the case, the function also computes the rounding unit, passes a dq in
// scratch memory to backward(), and rounds that dq to the case's. d: tokens from one key to the next, as in
// RoundingUnitBranch.
template <class Backward>
void run_branch_backward(Context& ctx, const Args& a, int64_t d, const Backward& backward) {
  Scratch::Scope scope(ctx.scratch);
  const AttendIn in{a["q"], a["k"], a["v"], documents_of(a)};
  const Tensor delta = scope.alloc(a["lse"].dtype, a["lse"].shape());
  attention_delta(ctx, delta, a["do"], a["o"]);
  AttendGradIn grad{a["do"], {}, delta, a["lse"]};
  if (a["one"].empty()) return backward(AttendGradOut{a["dq"], a["dk"], a["dv"]}, grad, in);

  const Tensor dq = scope.alloc(delta.dtype, a["dq"].shape());
  zero(ctx, dq);
  const Tensor unit =
      attend_rounding_unit(ctx, scope, dq, grad.dout, in.q, {{in.k, in.v, {}, delta, d}}, {}, {}, in.documents);
  // test_cards.cpp runs this case in f32 as well, and other tests run it on unaligned tensors. For these no kernel
  // computes dq, dk and dv together, so there is no unit.
  const bool has_kernel =
      ctx.device.is_cuda() && in.q.dtype == DType::bf16 && reinterpret_cast<uintptr_t>(in.q.data) % 16 == 0;
  TRIAD_CHECK(!has_kernel || !unit.empty(), "the case has no rounding unit");
  grad.rounding_unit = unit;
  backward(AttendGradOut{dq, a["dk"], a["dv"]}, grad, in);
  round_dq(ctx, a, dq);
}

}  // namespace triad
