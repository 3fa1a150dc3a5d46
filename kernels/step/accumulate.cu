// Gradient sums on the GPU, bound by memory. A thread adds 8 adjacent elements, whose random bits are one generator
// block if the sum is stored in bf16.
#include "engine/random_streams.h"
#include "kernels/common/stochastic.cuh"
#include "kernels/step/accumulate.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;

template <int V, class To, class From>
__device__ __forceinline__ void add(To* to, const From* from, const RoundingBits& bits, int64_t element) {
  float sum[V], x[V];
  load_vector<V>(sum, to);
  load_vector<V>(x, from);
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] += x[i];
  store_vector_stochastically<V>(to, sum, bits, element);
}

template <int V, class To, class From>
__global__ void __launch_bounds__(kThreads)
    accumulate_kernel(To* __restrict__ to, const From* __restrict__ from, int64_t n, uint64_t seed, uint64_t stream,
                      int64_t first_element) {
  const RoundingBits bits(seed, stream);
  const int64_t vectors = n / V, thread = int64_t{blockIdx.x} * kThreads + threadIdx.x, last = vectors * V + thread;
  if (thread < vectors) add<V>(to + thread * V, from + thread * V, bits, first_element + thread * V);
  if (last < n) add<1>(to + last, from + last, bits, first_element + last);  // the last n % V elements
}

}  // namespace

void accumulate(Context& ctx, Tensor dst, ConstTensor src, const AccumulateOptions& o) {
  const int64_t n = src.numel();
  const bool vectors =
      is_aligned(dst) && is_aligned(src) && (dst.dtype == DType::f32 || o.first_element % RoundingBits::kGroup == 0);
  dispatch_gpu_float(dst.dtype, [&]<class To>() {
    dispatch_gpu_float(src.dtype, [&]<class From>() {
      dispatch_vector<__nv_bfloat16>(vectors, [&]<int V>() {
        launch(ctx, "accumulate", accumulate_kernel<V, To, From>, dim3(ceil_div(n, kThreads * V)), dim3(kThreads), 0,
               dst.ptr<To>(), src.ptr<From>(), n, o.seed,
               random_stream(RandomUse::gradient_rounding, static_cast<uint64_t>(o.micro_step)), o.first_element);
      });
    });
  });
}

}  // namespace triad::cuda
