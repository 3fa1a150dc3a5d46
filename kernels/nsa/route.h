// Runs attention on a GPU on the route that runtime.kernels selects (common/route.h). On the reference route the
// kernels run on f32 copies of the operands, and the results are rounded to the outputs' dtype.
#pragma once
#include "kernels/common/route.h"
#include "kernels/nsa/attend.h"
#include "kernels/ops/cast.h"

namespace triad {

// Forward: calls run(context, out, in), which queues the kernels. op names the call in the route record.
template <class Run>
void attend_routed(Context& ctx, const char* op, const AttendOut& out, const AttendIn& in, Run&& run) {
  ctx.routes.set_call(in.q, in.k);
  dispatch_route(
      ctx, op, in.q.dtype, [&](Context& on) { run(on, out, in); },
      [&](Context& on) {
        Scratch::Scope scope(on.scratch);
        const AttendIn in_f32{upcasted(on, scope, in.q), upcasted(on, scope, in.k), upcasted(on, scope, in.v),
                              in.documents};
        const Tensor o = scope.alloc(DType::f32, out.o.shape());
        run(on, AttendOut{o, out.lse}, in_f32);
        downcast(on, out.o, o);
      });
}

// Backward: calls run(context, out, grad, in), which queues the kernels. op names the call in the route record.
template <class Run>
void attend_routed(Context& ctx, const char* op, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                   Run&& run) {
  ctx.routes.set_call(in.q, in.k);
  dispatch_route(
      ctx, op, in.q.dtype, [&](Context& on) { run(on, out, grad, in); },
      [&](Context& on) {
        Scratch::Scope scope(on.scratch);
        const AttendIn in_f32{upcasted(on, scope, in.q), upcasted(on, scope, in.k), upcasted(on, scope, in.v),
                              in.documents};
        AttendGradIn grad_f32 = grad;
        grad_f32.dout = upcasted(on, scope, grad.dout);
        AttendGradOut out_f32 = out;
        const bool round = out.dk.dtype != DType::f32;  // whether dk and dv are not f32
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
