// Cross-entropy on the CPU, in parallel over rows.
#include "kernels/ops/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "engine/op_scope.h"
#include "kernels/common/cpu_exp.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

void check_cross_entropy(const char* op, const ConstTensor& logits, const ConstTensor& lse, const ConstTensor& targets,
                         int64_t vocab) {
  TRIAD_CHECK(logits.rank == 2, "{}: logits are {}, not a matrix", op, logits.str());
  TRIAD_CHECK(0 < vocab && vocab <= logits.size(1), "{}: a vocabulary of {} for logits {}", op, vocab, logits.str());
  check_tensor("cross_entropy: lse", lse, {logits.size(0)}, acc_dtype(logits.dtype));
  check_tensor("cross_entropy: targets", targets, {logits.size(0)}, DType::i32);
}

// How many independent partial results a reduction over a row has, in a fixed order, so that the loops vectorise.
constexpr int64_t kLanes = 16;

template <class A, class T>
A max_of(const T* x, int64_t n) {
  A lane[kLanes];
  std::fill_n(lane, kLanes, static_cast<A>(x[0]));
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) {
      const A v = static_cast<A>(x[i + j]);
      lane[j] = v > lane[j] ? v : lane[j];
    }
  for (; i < n; ++i) lane[0] = std::max(lane[0], static_cast<A>(x[i]));
  return *std::max_element(lane, lane + kLanes);
}

template <class A, class T>
A sum_of_exp(const T* x, int64_t n, A max) {
  A lane[kLanes] = {}, sum = 0;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j) lane[j] += exp_of(static_cast<A>(x[i + j]) - max);
  }
  for (; i < n; ++i) sum += exp_of(static_cast<A>(x[i]) - max);
  for (int64_t j = 0; j < kLanes; ++j) sum += lane[j];
  return sum;
}

template <class T>
void forward_cpu(Context& ctx, Tensor loss, Tensor lse, ConstTensor logits, ConstTensor targets, int64_t vocab) {
  using A = acc_t<T>;
  parallel_for(ctx, logits.size(0), [&](int64_t i) {
    const T* x = logits.ptr<T>() + i * logits.stride[0];
    const int32_t target = targets.ptr<int32_t>()[i];
    const A max = max_of<A>(x, vocab), log_sum = std::log(sum_of_exp(x, vocab, max));
    lse.ptr<A>()[i] = max + log_sum;
    // Not lse - x: for logits near 1e4, lse has lost the digits that this difference keeps.
    loss.ptr<A>()[i] = target < 0 ? A{0} : (max - static_cast<A>(x[target])) + log_sum;
  });
}

template <class T>
void backward_cpu(Context& ctx, Tensor dlogits, ConstTensor logits, ConstTensor lse, ConstTensor targets, int64_t vocab,
                  LossScale scale) {
  using A = acc_t<T>;
  parallel_for(ctx, logits.size(0), [&](int64_t i) {
    const T* x = logits.ptr<T>() + i * logits.stride[0];
    T* dx = dlogits.ptr<T>() + i * dlogits.stride[0];
    const int32_t target = targets.ptr<int32_t>()[i];
    const A row_lse = lse.ptr<A>()[i];
    const int64_t columns = target < 0 ? 0 : vocab;  // columns that have a gradient
    const A factor = static_cast<A>(scale.value());
    // Read before the loop, which may overwrite x, since dx may be x.
    const A target_slope = columns > 0 ? exp_of(static_cast<A>(x[target]) - row_lse) - A{1} : A{0};
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) dx[j] = static_cast<T>(factor * exp_of(static_cast<A>(x[j]) - row_lse));
    if (columns > 0) dx[target] = static_cast<T>(factor * target_slope);
    std::fill(dx + columns, dx + dlogits.size(1), static_cast<T>(0.0f));
  });
}

}  // namespace

void cross_entropy_forward(Context& ctx, Tensor loss, Tensor lse, ConstTensor logits, ConstTensor targets,
                           int64_t vocab) {
  const OpScope op_scope(ctx, "cross_entropy_forward");
  check_cross_entropy("cross_entropy", logits, lse, targets, vocab);
  check_tensor("cross_entropy: loss", loss, lse.shape(), lse.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::cross_entropy_forward(ctx, loss, lse, logits, targets, vocab);
  }
  dispatch_float(logits.dtype, [&]<class T>() { forward_cpu<T>(ctx, loss, lse, logits, targets, vocab); });
}

void cross_entropy_backward(Context& ctx, Tensor dlogits, ConstTensor logits, ConstTensor lse, ConstTensor targets,
                            int64_t vocab, LossScale scale) {
  const OpScope op_scope(ctx, "cross_entropy_backward");
  check_cross_entropy("cross_entropy backward", logits, lse, targets, vocab);
  check_tensor("cross_entropy backward: dlogits", dlogits, logits.shape(), logits.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::cross_entropy_backward(ctx, dlogits, logits, lse, targets, vocab, scale);
  }
  dispatch_float(logits.dtype, [&]<class T>() { backward_cpu<T>(ctx, dlogits, logits, lse, targets, vocab, scale); });
}

void cross_entropy_forward_backward(Context& ctx, Tensor loss, Tensor dlogits, ConstTensor logits, ConstTensor targets,
                                    int64_t vocab, LossScale scale) {
  const OpScope op_scope(ctx, "cross_entropy_forward_backward");
  if (ctx.device.is_cuda()) {
    check_cross_entropy("cross_entropy", logits, loss, targets, vocab);
    check_tensor("cross_entropy: dlogits", dlogits, logits.shape(), logits.dtype);
    if constexpr (kBuiltWithCuda)
      return cuda::cross_entropy_forward_backward(ctx, loss, dlogits, logits, targets, vocab, scale);
  }
  Scratch::Scope scope(ctx.scratch);
  const Tensor lse = scope.alloc(acc_dtype(logits.dtype), {logits.size(0)});
  cross_entropy_forward(ctx, loss, lse, logits, targets, vocab);
  cross_entropy_backward(ctx, dlogits, logits, lse, targets, vocab, scale);
}

}  // namespace triad
