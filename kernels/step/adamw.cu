// AdamW on the GPU in one pass, bound by memory: for each parameter 16 bytes read (master, m, v, grad) and 14 written
// (2 of them the bf16 weight). A thread updates 8 adjacent parameters: two 16-byte loads of each of four arrays are 128
// bytes in flight, and the weights are one 16-byte store. Every thread computes the clip factor from the norm in device
// memory, so no other kernel is needed and the host need not wait. If the norm is not finite, no thread writes.
#include <cmath>

#include "kernels/common/bthd.cuh"
#include "kernels/step/adamw.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // parameters per thread

struct Coefficients {
  float beta1, new1, beta2, new2;  // new1, new2: 1 - beta1, 1 - beta2
  float decay, step_size;          // 1 - lr * weight_decay; lr / (1 - beta1^step)
  float root_scale, eps;           // 1 / sqrt(1 - beta2^step)
  double grad_clip;
};

struct State {
  float *master, *m, *v;
  __nv_bfloat16* weights;  // null if the model computes with master itself
  const float* grad;
};

template <int V>
__device__ __forceinline__ void update(const State& s, int64_t i, float clip, const Coefficients& c) {
  float p[V], m[V], v[V], g[V];
  load_vector<V>(p, s.master + i);
  load_vector<V>(m, s.m + i);
  load_vector<V>(v, s.v + i);
  load_vector<V>(g, s.grad + i);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float clipped = g[j] * clip;
    m[j] = c.beta1 * m[j] + c.new1 * clipped;
    v[j] = c.beta2 * v[j] + c.new2 * clipped * clipped;
    p[j] = p[j] * c.decay - c.step_size * m[j] / (sqrtf(v[j]) * c.root_scale + c.eps);
  }
  store_vector<V>(s.m + i, m);
  store_vector<V>(s.v + i, v);
  store_vector<V>(s.master + i, p);
  if (s.weights != nullptr) store_vector<V>(s.weights + i, p);
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(State s, const double* __restrict__ grad_norm_squared, int64_t n, Coefficients c) {
  const double norm = sqrt(*grad_norm_squared);
  if (!isfinite(norm)) return;
  const float clip = c.grad_clip > 0 ? static_cast<float>(fmin(1.0, c.grad_clip / (norm + 1e-6))) : 1.0f;
  const int64_t vectors = n / V, thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread < vectors) update<V>(s, thread * V, clip, c);
  if (thread < n - vectors * V) update<1>(s, vectors * V + thread, clip, c);  // the last n % V parameters
}

}  // namespace

void adamw(Context& ctx, Tensor master, Tensor weights, Tensor m, Tensor v, ConstTensor grad,
           ConstTensor grad_norm_squared, const AdamWOptions& o) {
  const int64_t n = master.numel();
  const double correction1 = 1 - std::pow(o.beta1, static_cast<double>(o.step));
  const double correction2 = 1 - std::pow(o.beta2, static_cast<double>(o.step));
  const Coefficients c{.beta1 = static_cast<float>(o.beta1),
                       .new1 = static_cast<float>(1 - o.beta1),
                       .beta2 = static_cast<float>(o.beta2),
                       .new2 = static_cast<float>(1 - o.beta2),
                       .decay = static_cast<float>(1 - o.lr * o.weight_decay),
                       .step_size = static_cast<float>(o.lr / correction1),
                       .root_scale = static_cast<float>(1 / std::sqrt(correction2)),
                       .eps = static_cast<float>(o.eps),
                       .grad_clip = o.grad_clip};
  const State state{master.ptr<float>(), m.ptr<float>(), v.ptr<float>(),
                    weights.empty() ? nullptr : weights.ptr<__nv_bfloat16>(), grad.ptr<float>()};
  const bool aligned = is_aligned(master) && is_aligned(m) && is_aligned(v) && is_aligned(grad) &&
                       (weights.empty() || is_aligned(weights));
  dispatch_vector<__nv_bfloat16>(aligned, [&]<int V>() {
    static_assert(V == 1 || V == kElements);
    launch(ctx, "adamw", adamw_kernel<V>, dim3(ceil_div(n, kThreads * V)), dim3(kThreads), 0, state,
           grad_norm_squared.ptr<double>(), n, c);
  });
}

}  // namespace triad::cuda
