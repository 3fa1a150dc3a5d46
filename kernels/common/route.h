// For ops with several kernels: records the route of a CPU call, and makes a context that forces the portable kernels
// (engine/routes.h).
#pragma once
#include "engine/context.h"

namespace triad {

// A copy of ctx with the lowest supported compute capability, so that only portable kernels apply.
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

}  // namespace triad
