// A call's route: which of an op's kernels runs it. runtime.kernels (KernelChoice in engine/routes.h) selects each op's
// route, and every call is recorded.
#pragma once
#include "engine/context.h"

namespace triad {

enum class Route {
  fastest,    // the fastest kernel for the card and the shape
  portable,   // the kernels that run on any card
  reference,  // portable kernels on f32 copies of bf16 operands, the result rounded once
};

// The route for a GPU call to `op` with operands in this dtype. In f32 the reference is the portable route.
inline Route route_of(const Context& ctx, const char* op, DType dtype) {
  switch (ctx.routes.wanted(op)) {
    case KernelChoice::automatic:
    case KernelChoice::fused:
    case KernelChoice::candidate:
      return Route::fastest;
    case KernelChoice::general:
      return Route::portable;
    case KernelChoice::reference:
      return dtype == DType::f32 ? Route::portable : Route::reference;
  }
  return Route::fastest;
}

// A copy of ctx whose ops use only kernels that run on any card.
inline Context portable_context(const Context& ctx) {
  Context portable = ctx;
  portable.portable_only = true;
  return portable;
}

// Queues a GPU call to `op` by its route. Calls run(context) for the fastest and the portable route,
// run_reference(context) for the reference, which must work on f32 operand copies. context is ctx for the fastest
// route, else its portable copy.
template <class Run, class RunReference>
void dispatch_route(Context& ctx, const char* op, DType dtype, Run&& run, RunReference&& run_reference) {
  const Route route = route_of(ctx, op, dtype);
  if (route == Route::fastest) return run(ctx);
  Context portable = portable_context(ctx);
  if (route == Route::portable) return run(portable);
  run_reference(portable);
}

// Records a call on the CPU. first, second: the operands whose shapes the record contains.
inline void record_cpu(Context& ctx, const char* op, const ConstTensor& first, const ConstTensor& second) {
  ctx.routes.set_call(first, second);
  ctx.routes.record(op, "cpu");
}

}  // namespace triad
