// Runs an attention branch on a GPU by its route (common/route.h). On the reference route the operands and results are
// f32 copies.
#pragma once
#include "kernels/common/route.h"
#include "kernels/nsa/attend.h"
#include "kernels/ops/upcast.h"

namespace triad {

// Forward of a branch: run(context, out, in) queues it.
template <class Run>
void attend_routed(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in, Run&& run) {
  ctx.routes.set_call(in.q, in.k);
  dispatch_route(
      ctx, op, in.q.dtype, [&](Context& on) { run(on, out, in); },
      [&](Context& on) {
        Scratch::Scope scope(on.scratch);
        const AttendIn in_f32{upcasted(on, scope, in.q), upcasted(on, scope, in.k), upcasted(on, scope, in.v)};
        const Tensor o = scope.alloc(DType::f32, out.o.shape());
        run(on, AttendOut{o, out.lse}, in_f32);
        downcast(on, out.o, o);
      });
}

// Backward of a branch: run(context, out, grad, in) queues it.
template <class Run>
void attend_routed(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                   Run&& run) {
  ctx.routes.set_call(in.q, in.k);
  dispatch_route(
      ctx, op, in.q.dtype, [&](Context& on) { run(on, out, grad, in); },
      [&](Context& on) {
        Scratch::Scope scope(on.scratch);
        const AttendIn in_f32{upcasted(on, scope, in.q), upcasted(on, scope, in.k), upcasted(on, scope, in.v)};
        AttendGradIn grad_f32 = grad;
        grad_f32.dout = upcasted(on, scope, grad.dout);
        AttendGradOut out_f32 = out;
        const bool round = out.dk.dtype != DType::f32;  // dk and dv
        if (round) {
          out_f32.dk = scope.alloc(DType::f32, out.dk.shape());
          out_f32.dv = scope.alloc(DType::f32, out.dv.shape());
        }
        run(on, out_f32, grad_f32, in_f32);
        if (!round) return;
        downcast(on, out.dk, out_f32.dk);
        downcast(on, out.dv, out_f32.dv);
      });
}

}  // namespace triad
