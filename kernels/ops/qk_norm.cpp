// QK-norm on the CPU, in parallel over tokens, and the checks of shapes.
#include "kernels/ops/qk_norm.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

// Checks heads that must have the shapes of x. Returns P, the number of tensors in x.
int64_t check_heads(const char* what, const ConstQkHeads& heads, const ConstQkHeads& x) {
  const ConstTensor& q = x[0];
  TRIAD_CHECK(q.rank == 4 && q.size(3) >= 1 && q.size(3) <= kMaxNormedWidth && is_float(q.dtype),
              "qk_norm: {} is not [B,T,H,D] with D from 1 to {}", q.str(), kMaxNormedWidth);
  int64_t P = 0, all = 0;
  for (size_t p = 0; p < x.size(); ++p) {
    TRIAD_CHECK(x[p].empty() == heads[p].empty(), "qk_norm: {} {} for x {}", what, heads[p].str(), x[p].str());
    if (x[p].empty()) continue;
    TRIAD_CHECK(static_cast<size_t>(P) == p, "qk_norm: keys {} follow absent ones", x[p].str());
    check_tensor("qk_norm: x", x[p], {q.size(0), q.size(1), x[p].size(2), q.size(3)}, q.dtype);
    check_tensor(what, heads[p], x[p].shape(), q.dtype);
    all += x[p].size(2);
    ++P;
  }
  TRIAD_CHECK(q.size(0) * q.size(1) * all <= std::numeric_limits<int32_t>::max(),
              "qk_norm: {} heads of {} are too many", all, q.str());
  return P;
}

// A head's elements in any of the tensors.
template <class T>
T* head_of(const Tensor& t, int64_t b, int64_t at, int64_t h) {
  return t.ptr<T>() + b * t.stride[0] + at * t.stride[1] + h * t.stride[2];
}
template <class T>
const T* head_of(const ConstTensor& t, int64_t b, int64_t at, int64_t h) {
  return t.ptr<T>() + b * t.stride[0] + at * t.stride[1] + h * t.stride[2];
}

template <class A, class T>
A inverse_rms(const T* x, int64_t D, double eps) {
  return A{1} / std::sqrt(dot<A>(x, x, D) / static_cast<A>(D) + static_cast<A>(eps));
}

template <class T>
void forward_cpu(Context& ctx, const QkHeads& y_out, const ConstQkHeads& x_in, ConstTensor w_in, double eps) {
  using A = acc_t<T>;
  const int64_t N = x_in[0].size(1), D = x_in[0].size(3);
  parallel_for(ctx, x_in[0].size(0) * N, [&](int64_t i) {
    for (size_t p = 0; p < x_in.size() && !x_in[p].empty(); ++p) {
      const T* const w = w_in.ptr<T>() + static_cast<int64_t>(p) * D;
      for (int64_t h = 0; h < x_in[p].size(2); ++h) {
        const T* const x = head_of<T>(x_in[p], i / N, i % N, h);
        T* const y = head_of<T>(y_out[p], i / N, i % N, h);
        const A r = inverse_rms<A>(x, D, eps);
        for (int64_t j = 0; j < D; ++j) y[j] = static_cast<T>(static_cast<A>(x[j]) * r * static_cast<A>(w[j]));
      }
    }
  });
}

// Backward of one head. With g = dy * w:  dx = r (g - x r^2 mean(g x)),  dw += dy x r. dx may be dy.
template <class T, class A>
void head_backward(T* dx, A* dw, const T* dy, const T* x, const T* w, int64_t D, double eps) {
  const A r = inverse_rms<A>(x, D, eps);
  A sum = 0;
  for (int64_t j = 0; j < D; ++j) {
    const A x_dy = static_cast<A>(x[j]) * static_cast<A>(dy[j]);
    dw[j] += x_dy * r;
    sum += x_dy * static_cast<A>(w[j]);
  }
  const A slope = r * r * sum / static_cast<A>(D);
  for (int64_t j = 0; j < D; ++j)
    dx[j] = static_cast<T>(r * (static_cast<A>(dy[j]) * static_cast<A>(w[j]) - static_cast<A>(x[j]) * slope));
}

// dw is summed in two stages of fixed order: pieces of 64 tokens in parallel, then the pieces in order.
template <class T>
void backward_cpu(Context& ctx, const QkHeads& dx, Tensor dw, const ConstQkHeads& dy, const ConstQkHeads& x,
                  ConstTensor w, double eps) {
  using A = acc_t<T>;
  constexpr int64_t kPiece = 64;
  const int64_t N = x[0].size(1), D = x[0].size(3), tokens = x[0].size(0) * N, pieces = ceil_div(tokens, kPiece),
                width = dw.size(0);
  Scratch::Scope scope(ctx.scratch);
  const Tensor partials = scope.alloc(dw.dtype, {pieces, width});
  parallel_for(ctx, pieces, [&](int64_t piece) {
    A* const partial = partials.ptr<A>() + piece * width;
    std::fill_n(partial, width, A{0});
    for (int64_t i = piece * kPiece; i < std::min((piece + 1) * kPiece, tokens); ++i) {
      const int64_t b = i / N, t = i % N;
      for (size_t p = 0; p < x.size() && !x[p].empty(); ++p) {
        const int64_t at = static_cast<int64_t>(p) * D;
        for (int64_t h = 0; h < x[p].size(2); ++h)
          head_backward(head_of<T>(dx[p], b, t, h), partial + at, head_of<T>(dy[p], b, t, h), head_of<T>(x[p], b, t, h),
                        w.ptr<T>() + at, D, eps);
      }
    }
  });
  parallel_for(ctx, width, [&](int64_t j) {
    A sum = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) sum += partials.ptr<A>()[piece * width + j];
    dw.ptr<A>()[j] += sum;
  });
}

}  // namespace

void qk_norm_forward(Context& ctx, const QkHeads& y, const ConstQkHeads& x, ConstTensor w, double eps) {
  const OpScope op_scope(ctx, "qk_norm_forward");
  const int64_t P = check_heads("qk_norm: y", {y[0], y[1], y[2], y[3]}, x);
  check_tensor("qk_norm: w", w, {P * x[0].size(3)}, x[0].dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::qk_norm_forward(ctx, y, x, w, eps);
  }
  dispatch_float(w.dtype, [&]<class T>() { forward_cpu<T>(ctx, y, x, w, eps); });
}

void qk_norm_backward(Context& ctx, const QkHeads& dx, Tensor dw, const ConstQkHeads& dy, const ConstQkHeads& x,
                      ConstTensor w, double eps) {
  const OpScope op_scope(ctx, "qk_norm_backward");
  check_heads("qk_norm backward: dx", {dx[0], dx[1], dx[2], dx[3]}, x);
  const int64_t P = check_heads("qk_norm backward: dy", dy, x);
  check_tensor("qk_norm backward: w", w, {P * x[0].size(3)}, x[0].dtype);
  check_tensor("qk_norm backward: dw", dw, w.shape(), acc_dtype(w.dtype));
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::qk_norm_backward(ctx, dx, dw, dy, x, w, eps);
  }
  dispatch_float(w.dtype, [&]<class T>() { backward_cpu<T>(ctx, dx, dw, dy, x, w, eps); });
}

}  // namespace triad
