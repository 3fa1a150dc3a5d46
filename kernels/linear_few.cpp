// The ops of the forward pass one after the other, where there is no kernel for all of them.
#include "kernels/linear_few.h"

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/activation.h"
#include "kernels/linear_silu.h"
#include "kernels/matmul.h"
#include "kernels/rmsnorm.h"

namespace triad {

namespace {

void in_turn(Context& ctx, Tensor y, ConstTensor x, ConstTensor w, const FewOptions& o) {
  using Activation = FewOptions::Activation;
  Scratch::Scope scope(ctx.scratch);
  if (!o.norm.empty()) {
    const Tensor h = scope.alloc(x.dtype, x.shape(), "normed rows");
    rmsnorm_forward(ctx, h, scope.alloc(acc_dtype(x.dtype), {x.size(0)}), x, o.norm, o.eps);
    x = h;
  }
  if (o.activation == Activation::none) return linear_forward(ctx, y, x, w, o.addend);
  const Tensor pre = scope.alloc(y.dtype, {x.size(0), w.size(0)}, "before the activation");
  if (o.activation == Activation::silu) return linear_silu_forward(ctx, y, pre, x, w);
  linear_forward(ctx, pre, x, w);
  swiglu_forward(ctx, y, pre.slice(1, 0, y.size(1)), pre.slice(1, y.size(1), 2 * y.size(1)));
}

}  // namespace

void linear_few(Context& ctx, Tensor y, ConstTensor x, ConstTensor w, const FewOptions& o) {
  const OpScope op_scope(ctx, "linear_few");
  TRIAD_CHECK(x.rank == 2 && y.rank == 2 && is_float(x.dtype), "linear_few: y {}, x {}", y.str(), x.str());
  const int64_t out = y.size(1);
  check_tensor("linear_few: y", y, {x.size(0), out}, x.dtype);
  check_tensor("linear_few: w", w, {o.activation == FewOptions::Activation::swiglu ? 2 * out : out, x.size(1)},
               x.dtype);
  if (!o.norm.empty()) check_tensor("linear_few: norm", o.norm, {x.size(1)}, x.dtype);
  if (!o.addend.empty()) {
    check_tensor("linear_few: addend", o.addend, y.shape(), y.dtype);
    TRIAD_CHECK(o.activation == FewOptions::Activation::none, "linear_few: an addend behind an activation");
  }
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) {
      // A plan does not know how rows are aligned: it asks for what the ops in turn need.
      if (!ctx.planning && cuda::linear_few(ctx, y, x, w, o)) return;
    }
  }
  in_turn(ctx, y, x, w, o);
}

}  // namespace triad
