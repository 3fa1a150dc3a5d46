// AdamW on the GPU in one pass, bound by memory. For each parameter it reads and writes, in bytes: in f32 16 (param, m,
// v, grad) and 14 (2 for the bf16 weight); with split masters 16 (weight, remainder and a tie bit for param) and 12;
// with everything in bf16 8 and 6. A thread updates 8 adjacent parameters: in f32 two 16-byte loads from each of four
// arrays are 128 bytes in flight, and the weights are one 16-byte store. The random bits for 8 bf16 values are one
// generator block, so a thread draws at most three blocks. Every thread computes the clip factor from the norm in
// device memory, so no other kernel is needed and the host need not wait. If the norm is not finite, no thread writes.
#include <cmath>

#include "kernels/update/adamw.h"
#include "kernels/update/masters.cuh"

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

template <class P, class M, class S, class G>
struct State {
  Masters<P> masters;
  M* m;
  S* v;
  const G* grad;
};

// What a bf16 state's random bits are drawn from (adamw.h).
struct Rounding {
  uint64_t seed, param, m, v;  // the three tensors' streams
  int64_t first;               // the first element's index in the flat parameter buffer
};

template <int V, class P, class M, class S, class G>
__device__ __forceinline__ void update(const State<P, M, S, G>& s, int64_t i, float clip, const Coefficients& c,
                                       const Rounding& r) {
  float p[V], m[V], v[V], g[V];
  const uint32_t ties = s.masters.template load<V>(p, i);
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
  store_vector_stochastically<V>(s.m + i, m, RoundingBits(r.seed, r.m), r.first + i);
  store_vector_stochastically<V>(s.v + i, v, RoundingBits(r.seed, r.v), r.first + i);
  s.masters.template store<V>(i, p, ties, RoundingBits(r.seed, r.param), r.first + i);
}

template <int V, class P, class M, class S, class G>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(State<P, M, S, G> s, const double* __restrict__ grad_norm_squared, int64_t n, Coefficients c,
                 Rounding r) {
  const double norm = sqrt(*grad_norm_squared);
  if (!isfinite(norm)) return;
  const float clip = c.grad_clip > 0 ? static_cast<float>(fmin(1.0, c.grad_clip / (norm + 1e-6))) : 1.0f;
  const int64_t vectors = n / V, thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread < vectors) update<V>(s, thread * V, clip, c, r);
  if (thread < n - vectors * V) update<1>(s, vectors * V + thread, clip, c, r);  // the last n % V parameters
}

}  // namespace

void adamw(Context& ctx, Tensor param, Tensor weights, Tensor m, Tensor v, ConstTensor grad,
           ConstTensor grad_norm_squared, const AdamWOptions& o, const TieBits& ties) {
  const int64_t n = m.numel();
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
  const Rounding r{.seed = o.seed,
                   .param = adamw_stream(o.step, AdamWTensor::param),
                   .m = adamw_stream(o.step, AdamWTensor::m),
                   .v = adamw_stream(o.step, AdamWTensor::v),
                   .first = o.first_element};
  // A vector's random bits are one block only if the vector begins where a block does.
  const bool any_bf16 = param.dtype == DType::bf16 || m.dtype == DType::bf16 || v.dtype == DType::bf16;
  const bool vectors = has_master_vectors(param, weights, ties) && is_aligned(m) && is_aligned(v) && is_aligned(grad) &&
                       !(any_bf16 && o.first_element % kElements != 0);
  dispatch_masters(param, [&]<class P>() {
    dispatch_gpu_float(m.dtype, [&]<class M>() {
      dispatch_gpu_float(v.dtype, [&]<class S>() {
        dispatch_gpu_float(grad.dtype, [&]<class G>() {
          dispatch_vector<__nv_bfloat16>(vectors, [&]<int V>() {
            static_assert(V == 1 || V == kElements);
            const State<P, M, S, G> state{Masters<P>(param, weights, ties), m.ptr<M>(), v.ptr<S>(), grad.ptr<G>()};
            launch(ctx, "adamw", adamw_kernel<V, P, M, S, G>, dim3(ceil_div(n, kThreads * V)), dim3(kThreads), 0, state,
                   grad_norm_squared.ptr<double>(), n, c, r);
          });
        });
      });
    });
  });
}

}  // namespace triad::cuda
