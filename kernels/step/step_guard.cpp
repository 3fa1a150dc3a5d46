// judge_step() on the CPU: decides whether a step may be applied.
#include "kernels/step/step_guard.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

template <class T>
int64_t first_bad_part(ConstTensor grads, ConstTensor parts) {
  for (int64_t i = 0; i < parts.size(0); ++i) {
    const int64_t* part = parts.ptr<int64_t>() + 2 * i;
    const T* g = grads.ptr<T>() + part[0];
    if (!std::all_of(g, g + part[1], [](T x) { return std::isfinite(static_cast<acc_t<T>>(x)); })) return i;
  }
  return -1;
}

// Sums the ranks' losses and stop requests, and finds the first rank whose numbers are not finite.
void read_ranks(double* numbers, ConstTensor ranks) {
  const int64_t world = ranks.empty() ? 0 : ranks.size(0);
  if (world > 0) numbers[StepNumbers::loss] = numbers[StepNumbers::index_loss] = 0;
  numbers[StepNumbers::bad_rank] = -1;
  numbers[StepNumbers::stop] = 0;
  for (int64_t r = 0; r < world; ++r) {
    const double* own = ranks.ptr<double>() + r * ranks.stride[0];
    numbers[StepNumbers::loss] += own[RankNumbers::loss];
    numbers[StepNumbers::index_loss] += own[RankNumbers::index_loss];
    numbers[StepNumbers::stop] += own[RankNumbers::stop];
    const bool bad = !std::isfinite(own[RankNumbers::loss]) || !std::isfinite(own[RankNumbers::index_loss]) ||
                     !std::isfinite(own[RankNumbers::probe]);
    if (bad && numbers[StepNumbers::bad_rank] < 0) numbers[StepNumbers::bad_rank] = static_cast<double>(r);
  }
}

}  // namespace

void judge_step(Context& ctx, Tensor numbers, ConstTensor grads, ConstTensor parts, ConstTensor ranks, bool halt) {
  const OpScope op_scope(ctx, "judge_step");
  check_tensor("judge_step: numbers", numbers, {StepNumbers::count}, DType::f64);
  check_tensor("judge_step: parts", parts, {parts.size(0), 2}, DType::i64);
  TRIAD_CHECK(grads.rank == 1 && grads.contiguous(), "judge_step: the gradients are {}", grads.str());
  if (!ranks.empty()) check_tensor("judge_step: ranks", ranks, {ranks.size(0), RankNumbers::count}, DType::f64);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::judge_step(ctx, numbers, grads, parts, ranks, halt);
  }
  parallel_for(ctx, 1, [&](int64_t) {
    double* const n = numbers.ptr<double>();
    read_ranks(n, ranks);
    const bool finite = std::isfinite(n[StepNumbers::loss]) && std::isfinite(n[StepNumbers::index_loss]) &&
                        std::isfinite(n[StepNumbers::norm_squared]) &&
                        std::isfinite(n[StepNumbers::index_norm_squared]);
    if (!finite && halt) n[StepNumbers::halted] = 1;
    const bool apply = finite && n[StepNumbers::halted] == 0;
    constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
    n[StepNumbers::applied] = apply ? n[StepNumbers::norm_squared] : kNaN;
    n[StepNumbers::index_applied] = apply ? n[StepNumbers::index_norm_squared] : kNaN;
    int64_t bad = -1;
    if (!finite) dispatch_float(grads.dtype, [&]<class T>() { bad = first_bad_part<T>(grads, parts); });
    n[StepNumbers::bad_part] = static_cast<double>(bad);
  });
}

}  // namespace triad
