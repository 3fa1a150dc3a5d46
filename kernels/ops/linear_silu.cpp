// A linear layer with SiLU or SwiGLU: the fused kernel if it supports the call, otherwise matmul and activation one
// after the other.
#include "kernels/ops/linear_silu.h"

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/route.h"
#include "kernels/ops/activation.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

// Whether runtime.kernels.matmul allows the fused kernel for this call. Also sets the operands whose shapes the
// recorded route contains.
bool may_fuse(Context& ctx, const char* op, const ConstTensor& first, const ConstTensor& second) {
  ctx.routes.set_call(first, second);
  return ctx.device.is_cuda() && route_of(ctx, op, first.dtype) == Route::fastest;
}

}  // namespace

void linear_silu_forward(Context& ctx, Tensor y, Tensor pre, ConstTensor x, ConstTensor w) {
  const OpScope op_scope(ctx, "linear_silu_forward");
  check_tensor("linear_silu: y", y, pre.shape(), x.dtype);
  if (may_fuse(ctx, "linear_silu", x, w)) {
    if constexpr (kBuiltWithCuda) {
      if (cuda::linear_silu_forward_sm90(ctx, y, pre, x, w)) return;
    }
  }
  linear_forward(ctx, pre, x, w);
  silu_forward(ctx, y, pre);
}

void linear_silu_backward(Context& ctx, Tensor dpre, Tensor y, ConstTensor dz, ConstTensor w_next, ConstTensor pre) {
  const OpScope op_scope(ctx, "linear_silu_backward");
  check_tensor("linear_silu backward: dpre", dpre, pre.shape(), pre.dtype);
  check_tensor("linear_silu backward: y", y, pre.shape(), pre.dtype);
  if (may_fuse(ctx, "linear_silu", dz, w_next)) {
    if constexpr (kBuiltWithCuda) {
      if (cuda::linear_silu_backward_sm90(ctx, dpre, y, dz, w_next, pre)) return;
    }
  }
  linear_backward_input(ctx, y, dz, w_next);
  silu_backward(ctx, dpre, y, pre, y);
}

void linear_swiglu_forward(Context& ctx, Tensor y, Tensor pre, ConstTensor x, ConstTensor w) {
  const OpScope op_scope(ctx, "linear_swiglu_forward");
  const int64_t hidden = y.size(1);
  check_tensor("linear_swiglu: pre", pre, {y.size(0), 2 * hidden}, x.dtype);
  if (may_fuse(ctx, "linear_swiglu", x, w)) {
    if constexpr (kBuiltWithCuda) {
      if (cuda::linear_swiglu_forward_sm90(ctx, y, pre, x, w)) return;
    }
  }
  linear_forward(ctx, pre, x, w);
  swiglu_forward(ctx, y, pre.slice(1, 0, hidden), pre.slice(1, hidden, 2 * hidden));
}

void linear_swiglu_backward(Context& ctx, Tensor dpre, Tensor y, ConstTensor dz, ConstTensor w_next, ConstTensor pre) {
  const OpScope op_scope(ctx, "linear_swiglu_backward");
  const int64_t hidden = y.size(1);
  check_tensor("linear_swiglu backward: pre", pre, {y.size(0), 2 * hidden}, y.dtype);
  check_tensor("linear_swiglu backward: dpre", dpre, pre.shape(), pre.dtype);
  if (may_fuse(ctx, "linear_swiglu", dz, w_next)) {
    if constexpr (kBuiltWithCuda) {
      if (cuda::linear_swiglu_backward_sm90(ctx, dpre, y, dz, w_next, pre)) return;
    }
  }
  linear_backward_input(ctx, y, dz, w_next);
  const auto halves = [&](auto t) { return std::pair(t.slice(1, 0, hidden), t.slice(1, hidden, 2 * hidden)); };
  const auto [dgate, dup] = halves(dpre);
  const auto [gate, up] = halves(pre);
  swiglu_backward(ctx, dgate, dup, y, gate, up, y);
}

}  // namespace triad
