// AdamW on the CPU, in f32 or f64.
#include "kernels/step/adamw.h"

#include <algorithm>
#include <cmath>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

template <class A>
void adamw_cpu(Context& ctx, Tensor master, Tensor weights, Tensor m_in, Tensor v_in, ConstTensor grad,
               ConstTensor grad_norm_squared, const AdamWOptions& o) {
  constexpr int64_t kPiece = 1 << 12;
  const int64_t n = master.numel();
  const double correction1 = 1 - std::pow(o.beta1, static_cast<double>(o.step));
  const double correction2 = 1 - std::pow(o.beta2, static_cast<double>(o.step));
  const A decay = static_cast<A>(1 - o.lr * o.weight_decay), step_size = static_cast<A>(o.lr / correction1);
  const A beta1 = static_cast<A>(o.beta1), new1 = static_cast<A>(1 - o.beta1), eps = static_cast<A>(o.eps);
  const A beta2 = static_cast<A>(o.beta2), new2 = static_cast<A>(1 - o.beta2);
  const A root_scale = static_cast<A>(1 / std::sqrt(correction2));
  parallel_for(ctx, ceil_div(n, kPiece), [&](int64_t piece) {
    const double norm = std::sqrt(*grad_norm_squared.ptr<double>());
    if (!std::isfinite(norm)) return;
    const A clip = o.grad_clip > 0 ? static_cast<A>(std::min(1.0, o.grad_clip / (norm + 1e-6))) : A{1};
    A *p = master.ptr<A>(), *m = m_in.ptr<A>(), *v = v_in.ptr<A>();
    const A* g_in = grad.ptr<A>();
    for (int64_t i = piece * kPiece; i < std::min((piece + 1) * kPiece, n); ++i) {
      const A g = g_in[i] * clip;
      m[i] = beta1 * m[i] + new1 * g;
      v[i] = beta2 * v[i] + new2 * g * g;
      p[i] = p[i] * decay - step_size * m[i] / (std::sqrt(v[i]) * root_scale + eps);
      if (!weights.empty()) weights.ptr<bf16>()[i] = bf16(static_cast<float>(p[i]));
    }
  });
}

}  // namespace

void adamw(Context& ctx, Tensor master, Tensor weights, Tensor m, Tensor v, ConstTensor grad,
           ConstTensor grad_norm_squared, const AdamWOptions& o) {
  const OpScope op_scope(ctx, "adamw");
  TRIAD_CHECK(master.rank == 1, "adamw: master is {}, not a vector", master.str());
  const bool in_double = master.dtype == DType::f64 && !ctx.device.is_cuda();
  const DType dtype = in_double ? DType::f64 : DType::f32;
  check_tensor("adamw: master", master, master.shape(), dtype);
  if (!weights.empty()) check_tensor("adamw: weights", weights, master.shape(), DType::bf16);
  check_tensor("adamw: m", m, master.shape(), dtype);
  check_tensor("adamw: v", v, master.shape(), dtype);
  check_tensor("adamw: grad", grad, master.shape(), dtype);
  check_tensor("adamw: grad_norm_squared", grad_norm_squared, {1}, DType::f64);
  TRIAD_CHECK(o.step >= 1, "adamw: step {}; the first is 1", o.step);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::adamw(ctx, master, weights, m, v, grad, grad_norm_squared, o);
  }
  if (in_double)
    adamw_cpu<double>(ctx, master, weights, m, v, grad, grad_norm_squared, o);
  else
    adamw_cpu<float>(ctx, master, weights, m, v, grad, grad_norm_squared, o);
}

}  // namespace triad
