// Runs an attention branch on the kernels that runtime.kernels asks for (engine/routes.h): the automatic choice, the
// portable kernels, or the reference in f32.
#pragma once
#include "kernels/common/route.h"
#include "kernels/nsa/attend.h"
#include "kernels/ops/upcast.h"

namespace triad {

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
  const AttendIn wide{upcasted(plain, scope, in.q), upcasted(plain, scope, in.k), upcasted(plain, scope, in.v)};
  const Tensor o = scope.alloc(DType::f32, out.o.shape());
  run(plain, AttendOut{o, out.lse}, wide);
  downcast(plain, out.o, o);
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
  const AttendIn wide{upcasted(plain, scope, in.q), upcasted(plain, scope, in.k), upcasted(plain, scope, in.v)};
  AttendGradIn wide_grad = grad;
  wide_grad.dout = upcasted(plain, scope, grad.dout);
  const bool narrows = out.dk.dtype != DType::f32;
  AttendGradOut wide_out = out;
  if (narrows) {
    wide_out.dk = scope.alloc(DType::f32, out.dk.shape());
    wide_out.dv = scope.alloc(DType::f32, out.dv.shape());
  }
  run(plain, wide_out, wide_grad, wide);
  if (!narrows) return;
  downcast(plain, out.dk, wide_out.dk);
  downcast(plain, out.dv, wide_out.dv);
}

}  // namespace triad
