// A linear layer with SiLU: the fused kernel if it supports the call, otherwise matmul and activation one after the
// other.
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
bool may_fuse(Context& ctx, const ConstTensor& first, const ConstTensor& second) {
  ctx.routes.set_call(first, second);
  return ctx.device.is_cuda() && route_of(ctx, "linear_silu", first.dtype) == Route::fastest;
}

}  // namespace

void linear_silu_forward(Context& ctx, Tensor y, Tensor pre, ConstTensor x, ConstTensor w) {
  const OpScope op_scope(ctx, "linear_silu_forward");
  check_tensor("linear_silu: y", y, pre.shape(), x.dtype);
  if (may_fuse(ctx, x, w)) {
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
  if (may_fuse(ctx, dz, w_next)) {
    if constexpr (kBuiltWithCuda) {
      if (cuda::linear_silu_backward_sm90(ctx, dpre, y, dz, w_next, pre)) return;
    }
  }
  linear_backward_input(ctx, y, dz, w_next);
  silu_backward(ctx, dpre, y, pre, y);
}

}  // namespace triad
