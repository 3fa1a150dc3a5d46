// How a call of an op that has several kernels gets to the one that is wanted (engine/routes.h). The choice between
// fused and general kernels is made where they are launched, by card and shape; here are the choices of a run.
#pragma once
#include "kernels/nsa_attend.h"
#include "kernels/widen.h"

namespace triad {

// General kernels are those that run where nothing is known of the card.
inline Context on_any_card(const Context& ctx) {
  constexpr int kLeast = 80;
  Context plain = ctx;
  plain.compute_capability = kLeast;
  return plain;
}

inline void record_cpu(Context& ctx, const char* op, const ConstTensor& first, const ConstTensor& second) {
  ctx.routes.set_call(first, second);
  ctx.routes.record(op, "cpu");
}

// On a GPU: run(context, out, in) queues the op, on this context or on that of any card, on the operands as they are or
// on their copies in f32.
template <class Run>
void attend_routed(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in, Run&& run) {
  ctx.routes.set_call(in.q, in.k);
  const KernelChoice choice = ctx.routes.wanted(op);
  if (choice == KernelChoice::automatic || choice == KernelChoice::fused) return run(ctx, out, in);
  Context plain = on_any_card(ctx);
  if (choice == KernelChoice::general || in.q.dtype == DType::f32) return run(plain, out, in);
  Scratch::Scope scope(ctx.scratch);
  const AttendIn wide{widened(plain, scope, in.q), widened(plain, scope, in.k), widened(plain, scope, in.v)};
  const Tensor o = scope.alloc(DType::f32, out.o.shape());
  run(plain, AttendOut{o, out.lse}, wide);
  narrow(plain, out.o, o);
}

// The same for backward: run(context, out, grad, in).
template <class Run>
void attend_routed(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                   Run&& run) {
  ctx.routes.set_call(in.q, in.k);
  const KernelChoice choice = ctx.routes.wanted(op);
  if (choice == KernelChoice::automatic || choice == KernelChoice::fused) return run(ctx, out, grad, in);
  Context plain = on_any_card(ctx);
  if (choice == KernelChoice::general || in.q.dtype == DType::f32) return run(plain, out, grad, in);
  Scratch::Scope scope(ctx.scratch);
  const AttendIn wide{widened(plain, scope, in.q), widened(plain, scope, in.k), widened(plain, scope, in.v)};
  AttendGradIn wide_grad = grad;
  wide_grad.dout = widened(plain, scope, grad.dout);
  const bool narrows = out.dk.dtype != DType::f32;
  AttendGradOut wide_out = out;
  if (narrows) {
    wide_out.dk = scope.alloc(DType::f32, out.dk.shape());
    wide_out.dv = scope.alloc(DType::f32, out.dv.shape());
  }
  run(plain, wide_out, wide_grad, wide);
  if (!narrows) return;
  narrow(plain, out.dk, wide_out.dk);
  narrow(plain, out.dv, wide_out.dv);
}

}  // namespace triad
