// AdamW on the CPU: state and gradients in f32 or bf16, or all in f64; masters also split.
#include "kernels/update/adamw.h"

#include <algorithm>
#include <cmath>

#include "engine/op_scope.h"
#include "engine/random_streams.h"
#include "kernels/common/parallel.h"
#include "kernels/update/stored_state.h"

namespace triad {

uint64_t adamw_stream(int64_t step, AdamWTensor tensor) {
  return random_stream(RandomUse::state_rounding, 4 * static_cast<uint64_t>(step) + static_cast<uint64_t>(tensor));
}

namespace {

template <class P, class M, class V, class G>
void adamw_cpu(Context& ctx, Tensor param, Tensor weights, Tensor m_in, Tensor v_in, ConstTensor grad,
               ConstTensor grad_norm_squared, const AdamWOptions& o, const TieBits& ties) {
  using A = acc_t<P>;
  constexpr int64_t kPiece = 1 << 12;
  const int64_t n = grad.numel();
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
    StoredMaster<P> p(param, weights, ties, o);
    StoredState<M> m(m_in, o, AdamWTensor::m);
    StoredState<V> v(v_in, o, AdamWTensor::v);
    const G* g_in = grad.ptr<G>();
    for (int64_t i = piece * kPiece; i < std::min((piece + 1) * kPiece, n); ++i) {
      const A g = static_cast<A>(g_in[i]) * clip;
      // Explicit fmas, since a compiler would fuse one product in a sum, not the same for each master type.
      const A new_m = std::fma(beta1, static_cast<A>(m.get(i)), new1 * g);
      const A new_v = std::fma(beta2, static_cast<A>(v.get(i)), new2 * g * g);
      const A step = step_size * new_m / std::fma(std::sqrt(new_v), root_scale, eps);
      const A new_p = std::fma(static_cast<A>(p.get(i)), decay, -step);
      m.set(i, new_m);
      v.set(i, new_v);
      p.set(i, new_p);
    }
  });
}

}  // namespace

void adamw(Context& ctx, Tensor param, Tensor weights, Tensor m, Tensor v, ConstTensor grad,
           ConstTensor grad_norm_squared, const AdamWOptions& o, const TieBits& ties) {
  const OpScope op_scope(ctx, "adamw");
  TRIAD_CHECK(m.rank == 1, "adamw: m is {}, not a vector", m.str());
  const bool in_double = param.dtype == DType::f64 && !ctx.device.is_cuda(), split = is_remainder(param);
  const auto check = [&](const char* what, const ConstTensor& t) {
    const bool narrow = !in_double && t.dtype == DType::bf16;
    check_tensor(what, t, m.shape(), in_double ? DType::f64 : narrow ? DType::bf16 : DType::f32);
  };
  if (split)
    check_split_master("adamw: split master", {param, weights, ties}, m.size(0));
  else
    check("adamw: param", param);
  check("adamw: m", m);
  check("adamw: v", v);
  check("adamw: grad", grad);
  if (!weights.empty()) {
    check_tensor("adamw: weights", weights, m.shape(), DType::bf16);
    TRIAD_CHECK(param.dtype != DType::bf16, "adamw: both param and weights are bf16");
  }
  check_tensor("adamw: grad_norm_squared", grad_norm_squared, {1}, DType::f64);
  TRIAD_CHECK(o.step >= 1, "adamw: step {}; the first is 1", o.step);
  TRIAD_CHECK(o.first_element >= 0, "adamw: first element {}", o.first_element);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::adamw(ctx, param, weights, m, v, grad, grad_norm_squared, o, ties);
  }
  if (in_double)
    return adamw_cpu<double, double, double, double>(ctx, param, weights, m, v, grad, grad_norm_squared, o, ties);
  const auto with_master = [&]<class P>() {
    dispatch_state("adamw: m", m.dtype, [&]<class M>() {
      dispatch_state("adamw: v", v.dtype, [&]<class V>() {
        dispatch_state("adamw: grad", grad.dtype, [&]<class G>() {
          adamw_cpu<P, M, V, G>(ctx, param, weights, m, v, grad, grad_norm_squared, o, ties);
        });
      });
    });
  };
  if (split) return with_master.template operator()<uint16_t>();
  dispatch_state("adamw: param", param.dtype, with_master);
}

}  // namespace triad
