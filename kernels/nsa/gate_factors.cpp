// Gates given as factors: checks, dispatch, CPU loops.
#include "kernels/nsa/gate_factors.h"

#include <algorithm>
#include <cmath>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

// Row i's gate factor for branch k. Rows are numbered in the order of t's axes: (b * T + t) * H + h.
template <class T, class TensorType>
auto& factor(const TensorType& t, int64_t i, int64_t k) {
  const int64_t H = t.size(2), T_ = t.size(1);
  return t
      .template ptr<T>()[i / H / T_ * t.stride[0] + i / H % T_ * t.stride[1] + i % H * t.stride[2] + k * t.stride[3]];
}

}  // namespace

void check_gate_factors(const char* op, const ConstTensor& gate, const ConstTensor& factors) {
  TRIAD_CHECK(gate.rank == 4 && gate.size(0) == 3 && gate.contiguous() && acc_dtype(gate.dtype) == gate.dtype,
              "{}: gate is {}, not [3,B,T,H]", op, gate.str());
  if (factors.empty()) return;
  TRIAD_CHECK(is_float(factors.dtype) && acc_dtype(factors.dtype) == gate.dtype, "{}: factors are {}, gates {}", op,
              factors.str(), gate.str());
  check_tensor(op, factors, {gate.size(1), gate.size(2), gate.size(3), 3}, factors.dtype);
}

void nsa_gate_factors_forward(Context& ctx, Tensor gate, ConstTensor factors) {
  const OpScope op_scope(ctx, "nsa_gate_factors_forward");
  check_gate_factors("nsa_gate_factors", gate, factors);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_gate_factors_forward(ctx, gate, factors);
  }
  const int64_t rows = gate.numel() / 3;
  dispatch_float(factors.empty() ? gate.dtype : factors.dtype, [&]<class T>() {
    using A = acc_t<T>;
    parallel_for(ctx, rows, [&](int64_t i) {
      for (int64_t k = 0; k < 3; ++k)
        gate.ptr<A>()[k * rows + i] = factors.empty() ? A{1} / A{3} : static_cast<A>(factor<T>(factors, i, k));
    });
  });
}

void nsa_gate_factors_backward(Context& ctx, Tensor dfactors, ConstTensor dgate) {
  const OpScope op_scope(ctx, "nsa_gate_factors_backward");
  check_gate_factors("nsa_gate_factors backward", dgate, dfactors);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_gate_factors_backward(ctx, dfactors, dgate);
  }
  const int64_t rows = dgate.numel() / 3;
  dispatch_float(dfactors.dtype, [&]<class T>() {
    parallel_for(ctx, rows, [&](int64_t i) {
      for (int64_t k = 0; k < 3; ++k) factor<T>(dfactors, i, k) = static_cast<T>(dgate.ptr<acc_t<T>>()[k * rows + i]);
    });
  });
}

void nsa_gate_dout(Context& ctx, const std::array<Tensor, 3>& gated, Tensor bounds, ConstTensor dout,
                   ConstTensor gate) {
  const OpScope op_scope(ctx, "nsa_gate_dout");
  TRIAD_CHECK(dout.rank == 4 && is_float(dout.dtype) && gate.rank == 4 && gate.contiguous(),
              "nsa_gate_dout: dout {}, gate {}", dout.str(), gate.str());
  const int64_t B = dout.size(0), T_ = dout.size(1), Hq = dout.size(2), dv = dout.size(3), H = gate.size(3);
  TRIAD_CHECK(H > 0 && Hq % H == 0, "nsa_gate_dout: gates {} for {} heads", gate.str(), Hq);
  check_tensor("nsa_gate_dout: gate", gate, {3, B, T_, H}, acc_dtype(dout.dtype));
  for (const Tensor& t : gated)
    if (!t.empty()) check_tensor("nsa_gate_dout: a gradient", t, dout.shape(), dout.dtype);
  if (!bounds.empty()) {
    check_tensor("nsa_gate_dout: bounds", bounds, {3, B, T_, bounds.size(3)}, gate.dtype);
    TRIAD_CHECK(bounds.contiguous() && bounds.size(3) > 0 && H % bounds.size(3) == 0,
                "nsa_gate_dout: bounds {} of gates {}", bounds.str(), gate.str());
  }
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_gate_dout(ctx, gated, bounds, dout, gate);
  }
  const int64_t tokens = B * T_, group = Hq / H;
  dispatch_float(dout.dtype, [&]<class T>() {
    using A = acc_t<T>;
    parallel_for(ctx, tokens, [&](int64_t i) {
      const int64_t b = i / T_, t = i % T_;
      for (int64_t k = 0; k < 3; ++k) {
        const A* const gates = gate.ptr<A>() + (k * tokens + i) * H;
        const Tensor& to = gated[static_cast<size_t>(k)];
        for (int64_t h = 0; h < Hq && !to.empty(); ++h) {
          const T* const from = dout.ptr<T>() + b * dout.stride[0] + t * dout.stride[1] + h * dout.stride[2];
          T* const row = to.ptr<T>() + b * to.stride[0] + t * to.stride[1] + h * to.stride[2];
          for (int64_t j = 0; j < dv; ++j) row[j] = static_cast<T>(gates[h / group] * static_cast<A>(from[j]));
        }
        if (bounds.empty()) continue;
        const int64_t Hkv = bounds.size(3), share = H / Hkv;
        for (int64_t g = 0; g < Hkv; ++g) {
          A most = 0;
          for (int64_t h = 0; h < share; ++h) most = std::max(most, std::abs(gates[g * share + h]));
          bounds.ptr<A>()[(k * tokens + i) * Hkv + g] = most * static_cast<A>(kGateBoundSlack);
        }
      }
    });
  });
}

}  // namespace triad
