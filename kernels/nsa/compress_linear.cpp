// phi avg and conv, weighted row sums: checks, dispatch, CPU loops.
#include <vector>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"
#include "kernels/nsa/cpu/compress.h"
#include "kernels/nsa/gate_factors.h"

namespace triad {

using namespace compress_cpu;

namespace {

// y_c = sum_i weight_i * x[c*d + i], weight_i 1/l or w[i,:] ----

template <class T>
void linear_forward_cpu(Context& ctx, Tensor y, ConstTensor x, const PhiWeights& weights, const PhiOptions& o,
                        const Documents& documents) {
  using A = acc_t<T>;
  const Blocks n(x, o, documents);
  parallel_for(ctx, n.B * n.Tc, [&](int64_t i) {
    const int64_t c = i % n.Tc, b = i / n.Tc, begin = n.begin(b, c);
    static thread_local std::vector<A> sum;
    for (int64_t h = 0; h < n.H; ++h) {
      sum.assign(static_cast<size_t>(n.D), A{0});
      for (int64_t k = 0; k < n.l && begin >= 0; ++k) {
        const T* row = row_of<T>(x, b, begin + k, h);
        if (o.kind == Phi::avg) {
          for (int64_t j = 0; j < n.D; ++j) sum[j] += static_cast<A>(row[j]);
        } else {
          const T* w = weights.w.ptr<T>() + k * weights.w.stride[0];
          for (int64_t j = 0; j < n.D; ++j) sum[j] += static_cast<A>(w[j]) * static_cast<A>(row[j]);
        }
      }
      const A scale = o.kind == Phi::avg ? A{1} / static_cast<A>(n.l) : A{1};
      T* to = row_of<T>(y, b, c, h);
      for (int64_t j = 0; j < n.D; ++j) to[j] = static_cast<T>(scale * sum[j]);
    }
  });
}

template <class T>
void linear_backward_cpu(Context& ctx, Tensor dx, const PhiGrads& grads, ConstTensor dy, ConstTensor x,
                         const PhiWeights& weights, const PhiOptions& o, const Documents& documents) {
  using A = acc_t<T>;
  const Blocks n(x, o, documents);
  parallel_for(ctx, n.B * n.T, [&](int64_t i) {
    const int64_t s = i % n.T, b = i / n.T;
    static thread_local std::vector<A> sum;
    for (int64_t h = 0; h < n.H; ++h) {
      sum.assign(static_cast<size_t>(n.D), A{0});
      n.for_each_cover(b, s, [&](int64_t c, int64_t k) {
        const A* row = row_of<A>(dy, b, c, h);
        if (o.kind == Phi::avg) {
          for (int64_t j = 0; j < n.D; ++j) sum[j] += row[j] / static_cast<A>(n.l);
        } else {
          const T* w = weights.w.ptr<T>() + k * weights.w.stride[0];
          for (int64_t j = 0; j < n.D; ++j) sum[j] += static_cast<A>(w[j]) * row[j];
        }
      });
      T* to = row_of<T>(dx, b, s, h);
      for (int64_t j = 0; j < n.D; ++j) to[j] = static_cast<T>(sum[j]);
    }
  });
  if (o.kind == Phi::avg) return;
  parallel_for(ctx, n.l, [&](int64_t k) {
    A* dw = grads.w.ptr<A>() + k * grads.w.stride[0];
    for (int64_t b = 0; b < n.B; ++b)
      for (int64_t c = 0; c < n.Tc; ++c) {
        const int64_t begin = n.begin(b, c);
        for (int64_t h = 0; h < n.H && begin >= 0; ++h) {
          const A* row = row_of<A>(dy, b, c, h);
          const T* from = row_of<T>(x, b, begin + k, h);
          for (int64_t j = 0; j < n.D; ++j) dw[j] += row[j] * static_cast<A>(from[j]);
        }
      }
  });
}

void check_linear(const PhiOptions& o) {
  TRIAD_CHECK(o.kind != Phi::mlp, "nsa_compress_linear: phi mlp needs nsa_compress");
}

}  // namespace

void nsa_compress_linear_forward(Context& ctx, Tensor y, ConstTensor x, const PhiWeights& w, const PhiOptions& o,
                                 const Documents& documents) {
  const OpScope op_scope(ctx, "nsa_compress_forward");
  check_linear(o);
  check_compress(x, y, x.dtype, w, o, documents);
  if (y.numel() == 0) return;
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::compress_linear_forward(ctx, y, x, w, o, documents);
  }
  dispatch_float(x.dtype, [&]<class T>() { linear_forward_cpu<T>(ctx, y, x, w, o, documents); });
}

void nsa_compress_linear_backward(Context& ctx, Tensor dx, const PhiGrads& grads, ConstTensor dy, ConstTensor x,
                                  const PhiWeights& w, const PhiOptions& o, const Documents& documents) {
  const OpScope op_scope(ctx, "nsa_compress_backward");
  check_linear(o);
  check_compress(x, dy, acc_dtype(x.dtype), w, o, documents);
  check_tensor("nsa_compress: dx", dx, x.shape(), x.dtype);
  check_phi("nsa_compress: a gradient of phi", grads, o, x.size(3), acc_dtype(x.dtype));
  if (dy.numel() == 0) return zero(ctx, dx);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::compress_linear_backward(ctx, dx, grads, dy, x, w, o, documents);
  }
  dispatch_float(x.dtype, [&]<class T>() { linear_backward_cpu<T>(ctx, dx, grads, dy, x, w, o, documents); });
}

void nsa_averages_and_gates(Context& ctx, const std::array<Tensor, 2>& y, const std::array<ConstTensor, 2>& x,
                            const CompressionBlocks& blocks, Tensor gate, ConstTensor factors,
                            const Documents& documents) {
  const OpScope op_scope(ctx, "nsa_averages_and_gates");
  const PhiOptions avg{blocks, Phi::avg};
  if (ctx.device.is_cuda()) {
    for (int i = 0; i < 2; ++i) check_compress(x[i], y[i], x[0].dtype, {}, avg, documents);
    check_gate_factors("nsa_averages_and_gates", gate, factors);
    if constexpr (kBuiltWithCuda)
      if (cuda::averages_and_gates(ctx, y, x, blocks, gate, factors, documents)) return;
  }
  for (int i = 0; i < 2; ++i) nsa_compress_linear_forward(ctx, y[i], x[i], {}, avg, documents);
  nsa_gate_factors_forward(ctx, gate, factors);
}

}  // namespace triad
