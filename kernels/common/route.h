// What the ops that have several kernels share: the record of which one took a call, and a context that forces the
// portable ones (engine/routes.h).
#pragma once
#include "engine/context.h"

namespace triad {

// A context that claims the least compute capability, so that only portable kernels apply.
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
