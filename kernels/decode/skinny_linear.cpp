// The skinny linear layer as a sequence of forward-pass ops, for calls that no fused kernel supports.
#include "kernels/decode/skinny_linear.h"

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/ops/linear_silu.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/rmsnorm.h"

namespace triad {

namespace {

void in_turn(Context& ctx, Tensor y, ConstTensor x, ConstTensor w, const SkinnyLinearOptions& o) {
  using Activation = SkinnyLinearOptions::Activation;
  Scratch::Scope scope(ctx.scratch);
  if (!o.norm.empty()) {
    const Tensor h = scope.alloc(x.dtype, x.shape(), "normed rows");
    rmsnorm_forward(ctx, h, scope.alloc(acc_dtype(x.dtype), {x.size(0)}), x, o.norm, o.eps);
    x = h;
  }
  if (o.activation == Activation::none) return linear_forward(ctx, y, x, w, o.addend);
  const Tensor pre = scope.alloc(y.dtype, {x.size(0), w.size(0)}, "before the activation");
  const auto forward = o.activation == Activation::silu ? linear_silu_forward : linear_swiglu_forward;
  forward(ctx, y, pre, x, w);
}

}  // namespace

void skinny_linear(Context& ctx, Tensor y, ConstTensor x, ConstTensor w, const SkinnyLinearOptions& o) {
  const OpScope op_scope(ctx, "skinny_linear");
  TRIAD_CHECK(x.rank == 2 && y.rank == 2 && is_float(x.dtype), "skinny_linear: y {}, x {}", y.str(), x.str());
  const int64_t out = y.size(1);
  check_tensor("skinny_linear: y", y, {x.size(0), out}, x.dtype);
  check_tensor("skinny_linear: w", w,
               {o.activation == SkinnyLinearOptions::Activation::swiglu ? 2 * out : out, x.size(1)}, x.dtype);
  if (!o.norm.empty()) check_tensor("skinny_linear: norm", o.norm, {x.size(1)}, x.dtype);
  if (!o.addend.empty()) {
    check_tensor("skinny_linear: addend", o.addend, y.shape(), y.dtype);
    TRIAD_CHECK(o.activation == SkinnyLinearOptions::Activation::none, "skinny_linear: an addend behind an activation");
  }
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) {
      // A plan does not know the row alignment, so it allocates this sequence's scratch.
      if (!ctx.planning && cuda::skinny_linear(ctx, y, x, w, o)) return;
    }
  }
  in_turn(ctx, y, x, w, o);
}

}  // namespace triad
