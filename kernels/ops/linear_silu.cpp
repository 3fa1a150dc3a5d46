// A linear layer with SiLU or SwiGLU: the fused kernel if it supports the call, otherwise matmul and activation one
// after the other.
#include "kernels/ops/linear_silu.h"

#include <utility>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/route.h"
#include "kernels/ops/activation.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

// Checks x [N,in], w [parts * hidden,in], pre [N,parts * hidden] and y [N,hidden], where pre has the activation's
// `parts` tensors: one for SiLU, gate and up for SwiGLU.
void check_forward(const char* op, int64_t parts, const Tensor& y, const Tensor& pre, const ConstTensor& x,
                   const ConstTensor& w) {
  TRIAD_CHECK(x.rank == 2 && y.rank == 2 && is_float(x.dtype), "{}: y {}, x {}", op, y.str(), x.str());
  const int64_t N = x.size(0), hidden = y.size(1);
  check_tensor(op, y, {N, hidden}, x.dtype);
  check_tensor(op, pre, {N, parts * hidden}, x.dtype);
  check_tensor(op, w, {parts * hidden, x.size(1)}, x.dtype);
}

// Checks dz [N,out], w_next [out,hidden], pre and dpre [N,parts * hidden] and y [N,hidden].
void check_backward(const char* op, int64_t parts, const Tensor& dpre, const Tensor& y, const ConstTensor& dz,
                    const ConstTensor& w_next, const ConstTensor& pre) {
  TRIAD_CHECK(dz.rank == 2 && y.rank == 2 && is_float(dz.dtype), "{}: y {}, dz {}", op, y.str(), dz.str());
  const int64_t N = dz.size(0), hidden = y.size(1);
  check_tensor(op, y, {N, hidden}, dz.dtype);
  check_tensor(op, pre, {N, parts * hidden}, dz.dtype);
  check_tensor(op, dpre, {N, parts * hidden}, dz.dtype);
  check_tensor(op, w_next, {dz.size(1), hidden}, dz.dtype);
}

// Tries the fused kernel if runtime.kernels.matmul allows it for `first`'s dtype. `fused` launches the kernel, or
// returns false if the kernel does not support the call. Returns whether the kernel was launched. The recorded route
// contains the shapes of `first` and `second`.
template <class Fused>
bool runs_fused(Context& ctx, const char* op, const ConstTensor& first, const ConstTensor& second,
                [[maybe_unused]] Fused&& fused) {
  ctx.routes.set_call(first, second);
  if constexpr (kBuiltWithCuda)
    return ctx.device.is_cuda() && route_of(ctx, op, first.dtype) == Route::fastest && fused();
  else
    return false;
}

// The two column halves: gate and up, or their gradients.
template <class T>
std::pair<T, T> halves(const T& pre) {
  const int64_t hidden = pre.size(1) / 2;
  return {pre.slice(1, 0, hidden), pre.slice(1, hidden, 2 * hidden)};
}

}  // namespace

void linear_silu_forward(Context& ctx, Tensor y, Tensor pre, ConstTensor x, ConstTensor w) {
  const OpScope op_scope(ctx, "linear_silu_forward");
  check_forward("linear_silu_forward", 1, y, pre, x, w);
  const auto fused = [&] { return cuda::linear_silu_forward_sm90(ctx, y, pre, x, w); };
  if (runs_fused(ctx, "linear_silu", x, w, fused)) return;
  linear_forward(ctx, pre, x, w);
  silu_forward(ctx, y, pre);
}

void linear_silu_backward(Context& ctx, Tensor dpre, Tensor y, ConstTensor dz, ConstTensor w_next, ConstTensor pre) {
  const OpScope op_scope(ctx, "linear_silu_backward");
  check_backward("linear_silu_backward", 1, dpre, y, dz, w_next, pre);
  const auto fused = [&] { return cuda::linear_silu_backward_sm90(ctx, dpre, y, dz, w_next, pre); };
  if (runs_fused(ctx, "linear_silu", dz, w_next, fused)) return;
  linear_backward_input(ctx, y, dz, w_next);
  silu_backward(ctx, dpre, y, pre, y);
}

void linear_swiglu_forward(Context& ctx, Tensor y, Tensor pre, ConstTensor x, ConstTensor w) {
  const OpScope op_scope(ctx, "linear_swiglu_forward");
  check_forward("linear_swiglu_forward", 2, y, pre, x, w);
  const auto fused = [&] { return cuda::linear_swiglu_forward_sm90(ctx, y, pre, x, w); };
  if (runs_fused(ctx, "linear_swiglu", x, w, fused)) return;
  linear_forward(ctx, pre, x, w);
  const auto [gate, up] = halves(pre);
  swiglu_forward(ctx, y, gate, up);
}

void linear_swiglu_backward(Context& ctx, Tensor dpre, Tensor y, ConstTensor dz, ConstTensor w_next, ConstTensor pre) {
  const OpScope op_scope(ctx, "linear_swiglu_backward");
  check_backward("linear_swiglu_backward", 2, dpre, y, dz, w_next, pre);
  const auto fused = [&] { return cuda::linear_swiglu_backward_sm90(ctx, dpre, y, dz, w_next, pre); };
  if (runs_fused(ctx, "linear_swiglu", dz, w_next, fused)) return;
  linear_backward_input(ctx, y, dz, w_next);
  const auto [dgate, dup] = halves(dpre);
  const auto [gate, up] = halves(pre);
  swiglu_backward(ctx, dgate, dup, y, gate, up, y);
}

}  // namespace triad
