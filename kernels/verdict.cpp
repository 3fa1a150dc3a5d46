// The verdict on a step, on the CPU.
#include "kernels/verdict.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/op_scope.h"
#include "kernels/parallel.h"

namespace triad {

namespace {

template <class A>
int64_t first_bad_part(ConstTensor grads, ConstTensor parts) {
  for (int64_t i = 0; i < parts.size(0); ++i) {
    const int64_t* part = parts.ptr<int64_t>() + 2 * i;
    const A* g = grads.ptr<A>() + part[0];
    if (!std::all_of(g, g + part[1], [](A x) { return std::isfinite(x); })) return i;
  }
  return -1;
}

}  // namespace

void judge_step(Context& ctx, Tensor numbers, ConstTensor grads, ConstTensor parts, bool halt) {
  const OpScope op_scope(ctx, "judge_step");
  check_tensor("judge_step: numbers", numbers, {StepNumbers::count}, DType::f64);
  check_tensor("judge_step: parts", parts, {parts.size(0), 2}, DType::i64);
  TRIAD_CHECK(grads.rank == 1 && grads.contiguous(), "judge_step: the gradients are {}", grads.str());
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::judge_step(ctx, numbers, grads, parts, halt);
  }
  parallel_for(ctx, 1, [&](int64_t) {
    double* const n = numbers.ptr<double>();
    const bool finite = std::isfinite(n[StepNumbers::loss]) && std::isfinite(n[StepNumbers::norm_squared]);
    if (!finite && halt) n[StepNumbers::halted] = 1;
    const bool apply = finite && n[StepNumbers::halted] == 0;
    n[StepNumbers::applied] = apply ? n[StepNumbers::norm_squared] : std::numeric_limits<double>::quiet_NaN();
    int64_t bad = -1;
    if (!finite)
      bad = grads.dtype == DType::f64 ? first_bad_part<double>(grads, parts) : first_bad_part<float>(grads, parts);
    n[StepNumbers::bad_part] = static_cast<double>(bad);
  });
}

}  // namespace triad
