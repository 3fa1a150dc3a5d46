// phi mlp: gathers each block's rows and applies two matrix products; checks, dispatch, CPU loops. avg and conv are in
// compress_linear.cpp.
#include "kernels/nsa/compress.h"

#include <algorithm>
#include <vector>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"
#include "kernels/nsa/cpu/compress.h"
#include "kernels/ops/activation.h"
#include "kernels/ops/cast.h"
#include "kernels/ops/matmul.h"

namespace triad {

using namespace compress_cpu;

namespace {

template <class T>
void gather_cpu(Context& ctx, Tensor rows, ConstTensor x, ConstTensor pos, const PhiOptions& o,
                const Documents& documents) {
  using A = acc_t<T>;
  const Blocks n(x, o, documents);
  parallel_for(ctx, n.B * n.Tc * n.H, [&](int64_t i) {
    const int64_t h = i % n.H, c = i / n.H % n.Tc, b = i / n.H / n.Tc, begin = n.begin(b, c);
    if (begin < 0) {
      std::fill_n(rows.ptr<T>() + i * rows.stride[0], n.l * n.D, T(0.0f));
      return;
    }
    for (int64_t k = 0; k < n.l; ++k) {
      T* to = rows.ptr<T>() + i * rows.stride[0] + k * n.D;
      const T *from = row_of<T>(x, b, begin + k, h), *p = pos.ptr<T>() + k * pos.stride[0];
      for (int64_t j = 0; j < n.D; ++j) to[j] = static_cast<T>(static_cast<A>(from[j]) + static_cast<A>(p[j]));
    }
  });
}

template <class T>
void scatter_cpu(Context& ctx, Tensor dx, Tensor dpos, ConstTensor drows, const PhiOptions& o,
                 const Documents& documents) {
  using A = acc_t<T>;
  const Blocks n(dx, o, documents);
  auto piece = [&](int64_t b, int64_t c, int64_t h, int64_t k) {
    return drows.ptr<T>() + ((b * n.Tc + c) * n.H + h) * drows.stride[0] + k * n.D;
  };
  parallel_for(ctx, n.B * n.T, [&](int64_t i) {
    const int64_t s = i % n.T, b = i / n.T;
    static thread_local std::vector<A> sum;
    for (int64_t h = 0; h < n.H; ++h) {
      sum.assign(static_cast<size_t>(n.D), A{0});
      n.for_each_cover(b, s, [&](int64_t c, int64_t k) { axpy(sum.data(), A{1}, piece(b, c, h, k), n.D); });
      T* to = row_of<T>(dx, b, s, h);
      for (int64_t j = 0; j < n.D; ++j) to[j] = static_cast<T>(sum[j]);
    }
  });
  parallel_for(ctx, n.l, [&](int64_t k) {
    A* to = dpos.ptr<A>() + k * dpos.stride[0];
    for (int64_t b = 0; b < n.B; ++b)
      for (int64_t c = 0; c < n.Tc; ++c)
        for (int64_t h = 0; h < n.H && n.begin(b, c) >= 0; ++h) axpy(to, A{1}, piece(b, c, h, k), n.D);
  });
}

void gather(Context& ctx, Tensor rows, ConstTensor x, ConstTensor pos, const PhiOptions& o,
            const Documents& documents) {
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::compress_gather(ctx, rows, x, pos, o, documents);
  }
  dispatch_float(x.dtype, [&]<class T>() { gather_cpu<T>(ctx, rows, x, pos, o, documents); });
}

void scatter(Context& ctx, Tensor dx, Tensor dpos, ConstTensor drows, const PhiOptions& o, const Documents& documents) {
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::compress_scatter(ctx, dx, dpos, drows, o, documents);
  }
  dispatch_float(dx.dtype, [&]<class T>() { scatter_cpu<T>(ctx, dx, dpos, drows, o, documents); });
}

// The MLP's first half: the gathered rows and fc1. Backward recomputes it, so that forward saves nothing.
struct MlpHidden {
  Tensor rows, hidden, act;  // [B*Tc*H, l*D], [.., 2D], SiLU(hidden)
};
MlpHidden mlp_hidden(Context& ctx, Scratch::Scope& scope, ConstTensor x, const PhiWeights& w, const PhiOptions& o,
                     const Documents& documents) {
  const Blocks n(x, o, documents);
  const int64_t N = n.B * n.Tc * n.H;
  const MlpHidden m{scope.alloc(x.dtype, {N, n.l * n.D}), scope.alloc(x.dtype, {N, 2 * n.D}),
                    scope.alloc(x.dtype, {N, 2 * n.D})};
  gather(ctx, m.rows, x, w.pos, o, documents);
  linear_forward(ctx, m.hidden, m.rows, w.fc1);
  silu_forward(ctx, m.act, m.hidden);
  return m;
}

void mlp_forward(Context& ctx, Tensor y, ConstTensor x, const PhiWeights& w, const PhiOptions& o,
                 const Documents& documents) {
  Scratch::Scope scope(ctx.scratch);
  const MlpHidden m = mlp_hidden(ctx, scope, x, w, o, documents);
  linear_forward(ctx, y.view({m.act.size(0), x.size(3)}), m.act, w.fc2);
}

void mlp_backward(Context& ctx, Tensor dx, const PhiGrads& grads, ConstTensor dy, ConstTensor x, const PhiWeights& w,
                  const PhiOptions& o, const Documents& documents) {
  Scratch::Scope scope(ctx.scratch);
  const MlpHidden m = mlp_hidden(ctx, scope, x, w, o, documents);
  const int64_t N = m.rows.size(0), D = x.size(3);
  if (dy.dtype != x.dtype) {  // both operands of a matrix product need the same dtype
    const Tensor rounded = scope.alloc(x.dtype, dy.shape());
    cast(ctx, rounded, dy);
    dy = rounded;
  }
  const Tensor dhidden = scope.alloc(x.dtype, m.hidden.shape()), drows = scope.alloc(x.dtype, m.rows.shape());
  linear_backward(ctx, dhidden, grads.fc2, dy.view({N, D}), m.act, w.fc2);
  silu_backward(ctx, dhidden, dhidden, m.hidden);
  linear_backward(ctx, drows, grads.fc1, dhidden, m.rows, w.fc1);
  scatter(ctx, dx, grads.pos, drows, o, documents);
}

}  // namespace

void nsa_compress_forward(Context& ctx, Tensor y, ConstTensor x, const PhiWeights& w, const PhiOptions& o,
                          const Documents& documents) {
  if (o.kind != Phi::mlp) return nsa_compress_linear_forward(ctx, y, x, w, o, documents);
  const OpScope op_scope(ctx, "nsa_compress_forward");
  check_compress(x, y, x.dtype, w, o, documents);
  if (y.numel() != 0) mlp_forward(ctx, y, x, w, o, documents);
}

void nsa_compress_backward(Context& ctx, Tensor dx, const PhiGrads& grads, ConstTensor dy, ConstTensor x,
                           const PhiWeights& w, const PhiOptions& o, const Documents& documents) {
  if (o.kind != Phi::mlp) return nsa_compress_linear_backward(ctx, dx, grads, dy, x, w, o, documents);
  const OpScope op_scope(ctx, "nsa_compress_backward");
  check_compress(x, dy, acc_dtype(x.dtype), w, o, documents);
  check_tensor("nsa_compress: dx", dx, x.shape(), x.dtype);
  check_phi("nsa_compress: a gradient of phi", grads, o, x.size(3), acc_dtype(x.dtype));
  if (dy.numel() == 0) return zero(ctx, dx);
  mlp_backward(ctx, dx, grads, dy, x, w, o, documents);
}

}  // namespace triad
