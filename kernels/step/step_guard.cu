// judge_step() on the GPU, by one CTA: decides whether a step may be applied. It searches the gradient for the first
// bad part only if a number is not finite.
#include "kernels/common/launch.cuh"
#include "kernels/step/step_guard.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 1024;

template <class T>
__global__ void __launch_bounds__(kThreads)
    judge_step_kernel(double* numbers, const T* __restrict__ grads, const int64_t* __restrict__ parts, int64_t count,
                      const double* __restrict__ ranks, int64_t world, int64_t rank_stride, bool halt) {
  const double norm_squared = numbers[StepNumbers::norm_squared],
               index_norm_squared = numbers[StepNumbers::index_norm_squared];
  double loss = world > 0 ? 0 : numbers[StepNumbers::loss], stop = 0;
  double index_loss = world > 0 ? 0 : numbers[StepNumbers::index_loss];
  int64_t bad_rank = -1;
  for (int64_t r = 0; r < world; ++r) {
    const double* own = ranks + r * rank_stride;
    loss += own[RankNumbers::loss];
    index_loss += own[RankNumbers::index_loss];
    stop += own[RankNumbers::stop];
    if (bad_rank < 0 && !(isfinite(own[RankNumbers::loss]) && isfinite(own[RankNumbers::index_loss]) &&
                          isfinite(own[RankNumbers::probe])))
      bad_rank = r;
  }
  const bool finite = isfinite(loss) && isfinite(index_loss) && isfinite(norm_squared) && isfinite(index_norm_squared);
  const bool halted = numbers[StepNumbers::halted] != 0 || (halt && !finite);
  int64_t bad = -1;
  for (int64_t i = 0; !finite && bad < 0 && i < count; ++i) {
    const T* part = grads + parts[2 * i];
    bool all_finite = true;
    for (int64_t j = threadIdx.x; j < parts[2 * i + 1]; j += kThreads) all_finite &= isfinite(to_float(part[j]));
    if (!__syncthreads_and(all_finite)) bad = i;
  }
  __syncthreads();  // all threads have read `numbers`
  if (threadIdx.x != 0) return;
  numbers[StepNumbers::loss] = loss;
  numbers[StepNumbers::index_loss] = index_loss;
  numbers[StepNumbers::bad_rank] = static_cast<double>(bad_rank);
  numbers[StepNumbers::stop] = stop;
  numbers[StepNumbers::halted] = halted;
  numbers[StepNumbers::applied] = finite && !halted ? norm_squared : nan("");
  numbers[StepNumbers::index_applied] = finite && !halted ? index_norm_squared : nan("");
  numbers[StepNumbers::bad_part] = static_cast<double>(bad);
}

}  // namespace

void judge_step(Context& ctx, Tensor numbers, ConstTensor grads, ConstTensor parts, ConstTensor ranks, bool halt) {
  dispatch_gpu_float(grads.dtype, [&]<class T>() {
    launch(ctx, "judge step", judge_step_kernel<T>, dim3(1), dim3(kThreads), 0, numbers.ptr<double>(), grads.ptr<T>(),
           parts.ptr<int64_t>(), parts.size(0), ranks.empty() ? nullptr : ranks.ptr<double>(),
           ranks.empty() ? 0 : ranks.size(0), ranks.stride[0], halt);
  });
}

}  // namespace triad::cuda
