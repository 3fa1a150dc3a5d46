// The skinny linear layer as a sequence of ops, for calls that no fused kernel supports: on a GPU the forward pass's,
// on the CPU with a product of its own.
#include "kernels/decode/skinny_linear.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/parallel.h"
#include "kernels/ops/activation.h"
#include "kernels/ops/linear_silu.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/rmsnorm.h"

namespace triad {

namespace {

// y = x w^T + addend on the CPU. Each element is one dot product in a fixed order, so a row's bits depend neither on
// the number of rows nor on the row's place among them, as they do in a BLAS.
template <class T>
void multiply_rows(Context& ctx, const Tensor& y, const ConstTensor& x, const ConstTensor& w,
                   const ConstTensor& addend) {
  using A = acc_t<T>;
  constexpr int64_t kColumns = 16;  // rows of w that stay in the cache while all rows of x pass
  const int64_t N = x.size(0), in = x.size(1), out = y.size(1);
  parallel_for(ctx, ceil_div(out, kColumns), [&](int64_t block) {
    const int64_t first = block * kColumns, last = std::min(out, first + kColumns);
    for (int64_t n = 0; n < N; ++n) {
      const T* const row = x.ptr<T>() + n * x.stride[0];
      const T* const base = addend.empty() ? nullptr : addend.ptr<T>() + n * addend.stride[0];
      T* const to = y.ptr<T>() + n * y.stride[0];
      for (int64_t j = first; j < last; ++j) {
        const A product = dot<A>(row, w.ptr<T>() + j * w.stride[0], in);
        to[j] = static_cast<T>(base == nullptr ? product : static_cast<A>(base[j]) + product);
      }
    }
  });
}

void in_turn_cpu(Context& ctx, const Tensor& y, const ConstTensor& x, const ConstTensor& w,
                 const SkinnyLinearOptions& o) {
  using Activation = SkinnyLinearOptions::Activation;
  Scratch::Scope scope(ctx.scratch);
  const bool activated = o.activation != Activation::none;
  const Tensor product = activated ? scope.alloc(y.dtype, {x.size(0), w.size(0)}, "before the activation") : y;
  dispatch_float(x.dtype, [&]<class T>() { multiply_rows<T>(ctx, product, x, w, o.addend); });
  const int64_t hidden = y.size(1);
  if (o.activation == Activation::silu) silu_forward(ctx, y, product);
  if (o.activation == Activation::swiglu)
    swiglu_forward(ctx, y, product.slice(1, 0, hidden), product.slice(1, hidden, 2 * hidden));
}

void in_turn(Context& ctx, Tensor y, ConstTensor x, ConstTensor w, const SkinnyLinearOptions& o) {
  using Activation = SkinnyLinearOptions::Activation;
  Scratch::Scope scope(ctx.scratch);
  if (!o.norm.empty()) {
    const Tensor h = scope.alloc(x.dtype, x.shape(), "normed rows");
    rmsnorm_forward(ctx, h, scope.alloc(acc_dtype(x.dtype), {x.size(0)}), x, o.norm, o.eps);
    x = h;
  }
  if (!ctx.device.is_cuda()) return in_turn_cpu(ctx, y, x, w, o);
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
