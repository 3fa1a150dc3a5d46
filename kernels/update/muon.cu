// Muon's momentum and update on the GPU, bound by memory: with state in f32 and u, o in bf16 the first kernel reads 8
// bytes an element and writes 6, the second reads 6 and writes 6, or with split masters 4. A CTA has one matrix piece;
// a thread takes 8 adjacent elements at a time. Every thread computes the clip factor from the norm in device memory;
// if that is not finite, no thread writes.
#include <cmath>

#include "kernels/update/adamw.h"
#include "kernels/update/masters.cuh"
#include "kernels/update/muon.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // elements per thread and pass

struct Momentum {
  float momentum, fresh;  // fresh: 1 - momentum
  double grad_clip;
  uint64_t seed, stream;  // random bits for m in bf16
  int64_t first;          // where m and grad begin in the flat parameter buffer
};
struct Update {
  float decay;  // 1 - lr * weight_decay
  double rate;  // lr * kMuonScale
  uint64_t seed, stream;
  int64_t first;
};

// Calls f.operator()<V>(j) for the piece's V-element vectors, j being the first element's index, where both this
// element and its place in u are multiples of V; f.operator()<1>(j) for all others.
template <int V, class F>
__device__ __forceinline__ void for_each_of_piece(const MuonPiece& piece, F&& f) {
  const int count = static_cast<int>(piece.count);
  const bool aligned = V > 1 && piece.element % V == 0 && piece.at % V == 0;
  const int vectors = aligned ? count / V : 0;
  for (int j = threadIdx.x; j < vectors; j += kThreads) f.template operator()<V>(j * V);
  for (int j = vectors * V + threadIdx.x; j < count; j += kThreads) f.template operator()<1>(j);
}

template <int V, class U, class M, class G>
__global__ void __launch_bounds__(kThreads)
    muon_momentum_kernel(U* __restrict__ u, M* __restrict__ m, const G* __restrict__ grad,
                         const double* __restrict__ grad_norm_squared, const MuonPiece* __restrict__ pieces,
                         Momentum c) {
  const double norm = sqrt(*grad_norm_squared);
  if (!isfinite(norm)) return;
  const float clip = c.grad_clip > 0 ? static_cast<float>(fmin(1.0, c.grad_clip / (norm + 1e-6))) : 1.0f;
  const MuonPiece piece = pieces[blockIdx.x];
  for_each_of_piece<V>(piece, [&]<int N>(int j) {
    const int64_t i = piece.element - c.first + j;
    float old[N], g[N], next[N];
    load_vector<N>(old, m + i);
    load_vector<N>(g, grad + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      g[k] *= clip;
      old[k] = c.momentum * old[k] + c.fresh * g[k];
      next[k] = c.momentum * old[k] + c.fresh * g[k];
    }
    store_vector_stochastically<N>(m + i, old, RoundingBits(c.seed, c.stream), c.first + i);
    store_vector<N>(u + piece.at + j, next);
  });
}

template <int V, class P, class U>
__global__ void __launch_bounds__(kThreads)
    muon_apply_kernel(Masters<P> masters, const U* __restrict__ o, const double* __restrict__ grad_norm_squared,
                      const MuonPiece* __restrict__ pieces, Update c) {
  if (!isfinite(*grad_norm_squared)) return;
  const MuonPiece piece = pieces[blockIdx.x];
  const float step_size = static_cast<float>(c.rate * sqrt(static_cast<double>(piece.longest)));
  for_each_of_piece<V>(piece, [&]<int N>(int j) {
    const int64_t i = piece.element - c.first + j;
    float p[N], x[N];
    const uint32_t ties = masters.template load<N>(p, i);
    load_vector<N>(x, o + piece.at + j);
#pragma unroll
    for (int k = 0; k < N; ++k) p[k] = p[k] * c.decay - step_size * x[k];
    masters.template store<N>(i, p, ties, RoundingBits(c.seed, c.stream), c.first + i);
  });
}

const MuonPiece* rows_of(const ConstTensor& pieces) {
  return reinterpret_cast<const MuonPiece*>(pieces.ptr<int64_t>());
}

// Whether the pieces' vectors that are aligned in the flat buffer are aligned in memory.
template <class... Tensors>
bool allow_vectors(const MuonOptions& o, const Tensors&... tensors) {
  return o.first_element % kElements == 0 && ((tensors.empty() || is_aligned(tensors)) && ...);
}

}  // namespace

void muon_momentum(Context& ctx, Tensor u, const MuonTensors& t, const MuonOptions& o) {
  const Momentum c{.momentum = static_cast<float>(o.momentum),
                   .fresh = static_cast<float>(1 - o.momentum),
                   .grad_clip = o.grad_clip,
                   .seed = o.seed,
                   .stream = adamw_stream(o.step, AdamWTensor::m),
                   .first = o.first_element};
  dispatch_gpu_float(u.dtype, [&]<class U>() {
    dispatch_gpu_float(t.m.dtype, [&]<class M>() {
      dispatch_gpu_float(t.grad.dtype, [&]<class G>() {
        dispatch_vector<__nv_bfloat16>(allow_vectors(o, u, t.m, t.grad), [&]<int V>() {
          static_assert(V == 1 || V == kElements);
          launch(ctx, "muon_momentum", muon_momentum_kernel<V, U, M, G>, dim3(t.pieces.size(0)), dim3(kThreads), 0,
                 u.ptr<U>(), t.m.ptr<M>(), t.grad.ptr<G>(), t.grad_norm_squared.ptr<double>(), rows_of(t.pieces), c);
        });
      });
    });
  });
}

void muon_apply(Context& ctx, const MuonTensors& t, ConstTensor update, const MuonOptions& o) {
  const Update c{.decay = static_cast<float>(1 - o.lr * o.weight_decay),
                 .rate = o.lr * kMuonScale,
                 .seed = o.seed,
                 .stream = adamw_stream(o.step, AdamWTensor::param),
                 .first = o.first_element};
  const bool vectors = allow_vectors(o, update) && has_master_vectors(t.param, t.weights, t.ties);
  dispatch_masters(t.param, [&]<class P>() {
    dispatch_gpu_float(update.dtype, [&]<class U>() {
      dispatch_vector<__nv_bfloat16>(vectors, [&]<int V>() {
        launch(ctx, "muon_apply", muon_apply_kernel<V, P, U>, dim3(t.pieces.size(0)), dim3(kThreads), 0,
               Masters<P>(t.param, t.weights, t.ties), update.ptr<U>(), t.grad_norm_squared.ptr<double>(),
               rows_of(t.pieces), c);
      });
    });
  });
}

}  // namespace triad::cuda
