// The rounding unit of a row of dq: additions to the row are rounded to multiples of it, so that any order of them
// gives the same bits (nsa/sm90/backward_d64.cu has the bound). Computed from the norms of dout, of the keys and of the
// values.
#include "kernels/nsa/sm90/backward.cuh"
#include "kernels/nsa/sm90/launch_backward.h"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kNormThreads = 256, kNormLanes = 8, kNormKeys = 256;
struct NormArgs {
  View<const bf16> k[kMostBranches], v[kMostBranches];
  int keys[kMostBranches];
  int groups;
  float2* norms;  // [B*Hkv, kMostBranches, chunks of 256 keys]: max |v|^2, and max |k| over keys and columns
};

// Largest magnitude and sum of squares of a row of 64 kPanels columns, of which a lane has every eighth 16 bytes.
template <int kPanels>
struct RowNorm {
  uint4 loaded[kPanels];
  __device__ __forceinline__ void load(const bf16* row, int lane) {
#pragma unroll
    for (int i = 0; i < kPanels; ++i) loaded[i] = __ldg(reinterpret_cast<const uint4*>(row) + lane + i * kNormLanes);
  }
  __device__ __forceinline__ float largest() const {
    float most = 0;
    each([&](float2 pair) { most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y))); });
    return most;
  }
  __device__ __forceinline__ float squares() const {
    float sum = 0;
    each([&](float2 pair) { sum = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, sum)); });
    for (int o = kNormLanes / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kFullWarp, sum, o);
    return sum;
  }

 private:
  template <class F>
  __device__ __forceinline__ void each(F&& f) const {
#pragma unroll
    for (int i = 0; i < kPanels; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(__bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&loaded[i])[e]));
  }
};

// A CTA has 256 keys of a (b, g) and branch, 8 lanes per key. Maxima do not depend on their order.
template <int kPanels>
__global__ void __launch_bounds__(kNormThreads) bwd_key_norms_kernel(const __grid_constant__ NormArgs a) {
  constexpr int kWarps = kNormThreads / 32, kStep = kNormThreads / kNormLanes;
  __shared__ float2 maxima[kWarps];
  const int bg = blockIdx.y, b = bg / a.groups, g = bg % a.groups, branch = blockIdx.z, keys = a.keys[branch];
  const int key0 = static_cast<int>(blockIdx.x) * kNormKeys + static_cast<int>(threadIdx.x) / kNormLanes;
  const View<const bf16>&k = a.k[branch], &v = a.v[branch];
  float max_v = 0, max_k = 0;
  if (static_cast<int>(blockIdx.x) * kNormKeys < keys) {
    constexpr int kInFlight = 4;
    RowNorm<kPanels> k_rows[kInFlight], v_rows[kInFlight];
    for (int i = 0; i < kNormKeys; i += kStep * kInFlight) {
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int key = min(key0 + i + j * kStep, keys - 1);
        k_rows[j].load(k.at(b, key, g), threadIdx.x % kNormLanes);
        v_rows[j].load(v.at(b, key, g), threadIdx.x % kNormLanes);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j)
        max_k = fmaxf(max_k, k_rows[j].largest()), max_v = fmaxf(max_v, v_rows[j].squares());
    }
  }
  max_v = warp_max(max_v), max_k = warp_max(max_k);
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = make_float2(max_v, max_k);
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) max_v = fmaxf(max_v, maxima[i].x), max_k = fmaxf(max_k, maxima[i].y);
  a.norms[(static_cast<int64_t>(bg) * kMostBranches + branch) * gridDim.x + blockIdx.x] = make_float2(max_v, max_k);
}

struct DoutNorms {
  View<const bf16> dout;
  View<float> norm;
  Divisor heads;  // query heads per group
  int rows, groups;
};
// |dout|, for callers that do not pass it (nsa_combine_backward computes it). 8 lanes per row (t, h) of a (b, g).
template <int kPanels>
__global__ void __launch_bounds__(kNormThreads) bwd_dout_norms_kernel(const __grid_constant__ DoutNorms a) {
  const int bg = blockIdx.y, b = bg / a.groups, g = bg % a.groups, lane = threadIdx.x % kNormLanes;
  const int row = static_cast<int>(blockIdx.x * (kNormThreads / kNormLanes) + threadIdx.x / kNormLanes);
  const int clamped = min(row, a.rows - 1), t = a.heads.quotient(clamped);
  const int head = g * a.heads.value() + clamped - t * a.heads.value();
  RowNorm<kPanels> dout;
  dout.load(a.dout.at(b, t, head), lane);
  const float norm = sqrtf(dout.squares());
  if (row < a.rows && lane == 0) *a.norm.at(b, t, head) = norm;
}

struct RoundingUnitArgs {
  View<float> rounding_unit;
  View<const float> dout_norm;
  View<const float> gate[kMostBranches], delta[kMostBranches];
  const float2* norms;
  int chunks;  // chunks of norms per (b, g) and branch
  Divisor heads;
  int rows, groups;
  float scale;
};

// Stores r = 2^23 u, the largest power of two that the bound reaches; sums stay below twice that. With r's sign set to
// that of x, x + r has a magnitude where fp32 is spaced by u or more, so (x + r) - r is x rounded to that spacing. One
// thread per row (t, h) of a (b, g).
__global__ void __launch_bounds__(kNormThreads) bwd_rounding_unit_kernel(const __grid_constant__ RoundingUnitArgs a) {
  const int bg = blockIdx.y, b = bg / a.groups, g = bg % a.groups;
  const int row = static_cast<int>(blockIdx.x * kNormThreads + threadIdx.x), clamped = min(row, a.rows - 1);
  const int t = a.heads.quotient(clamped), head = g * a.heads.value() + clamped - t * a.heads.value();
  const float dout = *a.dout_norm.at(b, t, head);
  float gate[kMostBranches], delta[kMostBranches];
#pragma unroll
  for (int i = 0; i < kMostBranches; ++i) {
    gate[i] = a.gate[i].data == nullptr ? 1.0f : *a.gate[i].at(b, t, g);
    delta[i] = a.delta[i].data == nullptr ? 0.0f : *a.delta[i].at(b, t, head);
  }
  __shared__ float2 norms[kMostBranches];
  if (const int of = threadIdx.x / 32; of < kMostBranches) {
    float2 most = {};
    for (int i = threadIdx.x % 32; i < a.chunks; i += 32) {
      const float2 x = a.norms[(static_cast<int64_t>(bg) * kMostBranches + of) * a.chunks + i];
      most = make_float2(fmaxf(most.x, x.x), fmaxf(most.y, x.y));
    }
    most = make_float2(warp_max(most.x), warp_max(most.y));
    if (threadIdx.x % 32 == 0) norms[of] = make_float2(sqrtf(most.x), most.y);
  }
  __syncthreads();
  if (row >= a.rows) return;
  float bound = 0;
#pragma unroll
  for (int i = 0; i < kMostBranches; ++i)
    if (a.delta[i].data != nullptr) bound += a.scale * fmaf(gate[i] * dout, norms[i].x, fabsf(delta[i])) * norms[i].y;
  constexpr float kRounding = 1.1f;  // exceeds the rounding errors of p, ds and the addends
  bound = fminf(fmaxf(bound * kRounding, 1e-28f), 1e37f);
  *a.rounding_unit.at(b, t, head) = __int_as_float(__float_as_int(bound) & 0x7f800000);
}

// Calls f.template operator()<dk / 64>().
template <class F>
void dispatch_norms(int64_t dk, F&& f) {
  dk == 64 ? f.template operator()<1>() : f.template operator()<2>();
}

}  // namespace

void key_norms_sm90(Context& ctx, Tensor norms, int64_t head_width, const std::vector<RoundingUnitBranch>& branches) {
  static_assert(kNormKeys == kKeyNormsChunk);
  NormArgs n{.groups = static_cast<int>(branches[0].k.size(2)), .norms = reinterpret_cast<float2*>(norms.data)};
  for (size_t i = 0; i < branches.size(); ++i) {
    n.k[i] = make_view<const bf16>(branches[i].k), n.v[i] = make_view<const bf16>(branches[i].v);
    n.keys[i] = static_cast<int>(branches[i].k.size(1));
  }
  dispatch_norms(head_width, [&]<int kPanels>() {
    launch(ctx, "key_norms", bwd_key_norms_kernel<kPanels>, dim3(norms.size(2), norms.size(0), kMostBranches),
           dim3(kNormThreads), 0, n);
  });
}

Tensor rounding_unit_sm90(Context& ctx, Scratch::Scope& scope, ConstTensor dout, ConstTensor q,
                          const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm,
                          ConstTensor key_norms) {
  const int64_t groups = branches[0].k.size(2), bgs = q.size(0) * groups, G = q.size(2) / groups;
  const auto heads = Divisor(static_cast<int>(G));
  const int rows = static_cast<int>(q.size(1) * G);
  const Tensor rounding_unit = scope.alloc(DType::f32, {q.size(0), q.size(1), q.size(2)});
  Scratch::Scope inner(ctx.scratch);
  if (key_norms.empty()) {
    const Tensor made = inner.alloc(DType::f32, key_norms_shape(branches));
    key_norms_sm90(ctx, made, q.size(3), branches);
    key_norms = made;
  }
  if (dout_norm.empty()) {
    const Tensor made = inner.alloc(DType::f32, rounding_unit.shape());
    const DoutNorms d{make_view<const bf16>(dout), make_view<float>(made), heads, rows, static_cast<int>(groups)};
    dispatch_norms(q.size(3), [&]<int kPanels>() {
      launch(ctx, "dout_norms", bwd_dout_norms_kernel<kPanels>, dim3(ceil_div(rows, kNormThreads / kNormLanes), bgs),
             dim3(kNormThreads), 0, d);
    });
    dout_norm = made;
  }
  RoundingUnitArgs a{.rounding_unit = make_view<float>(rounding_unit),
                     .dout_norm = make_view<const float>(dout_norm),
                     .norms = reinterpret_cast<const float2*>(key_norms.data),
                     .chunks = static_cast<int>(key_norms.size(2)),
                     .heads = heads,
                     .rows = rows,
                     .groups = static_cast<int>(groups),
                     .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(q.size(3))))};
  for (size_t i = 0; i < branches.size(); ++i)
    a.gate[i] = make_view<const float>(branches[i].gate), a.delta[i] = make_view<const float>(branches[i].delta);
  launch(ctx, "dq_rounding_unit", bwd_rounding_unit_kernel, dim3(ceil_div(rows, kNormThreads), bgs), dim3(kNormThreads),
         0, a);
  return rounding_unit;
}

}  // namespace triad::cuda
