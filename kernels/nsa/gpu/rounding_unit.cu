// A dq row's rounding unit: additions to the row are rounded to multiples of it, so that any order gives the same bits
// (nsa/sm90/backward_d64.cu has the bound). It is computed from the norms of dout, keys and values.
#include "kernels/nsa/gpu/rounding_unit.h"

#include "kernels/nsa/gpu/attend.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kNormThreads = 256, kNormLanes = 8, kNormKeys = 256;
struct NormArgs {
  View<const bf16> k[kMostBranches], v[kMostBranches];
  int keys[kMostBranches];
  int groups;
  // [B*Hkv, kMostBranches, chunks of 256 keys]: the largest |v|^2 over keys, and the largest |k| over elements. For
  // packed rows [B*Hkv, kMostBranches, ids]: the same over a document's keys, at its first block's id.
  float2* norms;
  int entries;  // chunks or ids
  DocumentView documents;
  int d[kMostBranches];  // tokens from one key to the next
};

// The largest magnitude and the sum of squares in a row with 64 kPanels columns. Eight lanes share a row: each loads
// every eighth 16-byte vector.
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

// Raises a maximum in global memory. Both numbers are >= 0, so their bits, read as integers, have the same order.
__device__ __forceinline__ void raise_to(float& most, float x) {
  atomicMax(reinterpret_cast<int*>(&most), __float_as_int(x));
}

// Computes the norms for 256 keys in one sequence, group and branch per CTA, with 8 lanes per key. Maxima don't depend
// on the order in which they are computed. In packed rows, 256 keys in one document raise the document's maxima
// together; keys in several documents raise them one by one.
template <int kPanels>
__global__ void __launch_bounds__(kNormThreads) bwd_key_norms_kernel(const __grid_constant__ NormArgs a) {
  constexpr int kWarps = kNormThreads / 32, kStep = kNormThreads / kNormLanes;
  __shared__ float2 maxima[kWarps];
  const int bg = blockIdx.y, b = bg / a.groups, g = bg % a.groups, branch = blockIdx.z, keys = a.keys[branch];
  const int key0 = static_cast<int>(blockIdx.x) * kNormKeys + static_cast<int>(threadIdx.x) / kNormLanes;
  const View<const bf16>&k = a.k[branch], &v = a.v[branch];
  const DocumentRow<int> documents = a.documents.row(b);
  float2* const norms = a.norms + (static_cast<int64_t>(bg) * kMostBranches + branch) * a.entries;
  const auto document_of = [&](int key) { return documents.first_block(documents.owner(key, a.d[branch])); };
  const int first_key = static_cast<int>(blockIdx.x) * kNormKeys, last_key = min(first_key + kNormKeys, keys) - 1;
  const bool mixed = documents.packed() && first_key <= last_key && document_of(first_key) != document_of(last_key);
  float max_v = 0, max_k = 0;
  if (mixed) {
#pragma unroll 1
    for (int i = 0; i < kNormKeys; i += kStep) {
      const int key = min(key0 + i, last_key);
      RowNorm<kPanels> k_row, v_row;
      k_row.load(k.at(b, key, g), threadIdx.x % kNormLanes);
      v_row.load(v.at(b, key, g), threadIdx.x % kNormLanes);
      float k_largest = k_row.largest();
      const float v_squares = v_row.squares();
      for (int o = kNormLanes / 2; o > 0; o /= 2)
        k_largest = fmaxf(k_largest, __shfl_xor_sync(kFullWarp, k_largest, o));
      float2& most = norms[document_of(key)];
      if (threadIdx.x % kNormLanes == 0) raise_to(most.x, v_squares), raise_to(most.y, k_largest);
    }
  } else if (first_key < keys) {
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
  if (!documents.packed()) {
    norms[blockIdx.x] = make_float2(max_v, max_k);
  } else if (!mixed && first_key <= last_key) {
    float2& most = norms[document_of(first_key)];
    raise_to(most.x, max_v), raise_to(most.y, max_k);
  }
}

struct DoutNorms {
  View<const bf16> dout;
  View<float> norm;
  Divisor heads;  // query heads per group
  int rows, groups;
};
// Computes |dout| for each query row, for callers that don't pass it (nsa_combine_backward computes it too). 8 lanes
// per row.
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
  int entries;  // norms per sequence, group and branch: chunks of 256 keys; for packed rows, ids
  DocumentView documents;
  Divisor heads;
  int rows, groups;
  float scale;
};

// Stores r = 2^23 u, where u is the rounding unit: r is the largest power of two that doesn't exceed the bound on the
// row's sums, so the sums stay below 2 r. If r has x's sign, fp32 numbers near x + r are spaced by u or more, so (x +
// r) - r is x rounded to that spacing. One thread per query row.
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
  const float2* const all_norms = a.norms + static_cast<int64_t>(bg) * kMostBranches * a.entries;
  const DocumentRow<int> documents = a.documents.row(b);
  __shared__ float2 norms[kMostBranches];
  if (const int of = threadIdx.x / 32; of < kMostBranches && !documents.packed()) {
    float2 most = {};
    for (int i = threadIdx.x % 32; i < a.entries; i += 32) {
      const float2 x = all_norms[static_cast<int64_t>(of) * a.entries + i];
      most = make_float2(fmaxf(most.x, x.x), fmaxf(most.y, x.y));
    }
    most = make_float2(warp_max(most.x), warp_max(most.y));
    if (threadIdx.x % 32 == 0) norms[of] = make_float2(sqrtf(most.x), most.y);
  }
  __syncthreads();
  if (row >= a.rows) return;
  float bound = 0;
#pragma unroll
  for (int i = 0; i < kMostBranches; ++i) {
    if (a.delta[i].data == nullptr) continue;
    float2 most = norms[i];
    if (documents.packed()) {
      most = all_norms[static_cast<int64_t>(i) * a.entries + documents.first_block(t)];
      most.x = sqrtf(most.x);
    }
    bound += a.scale * fmaf(gate[i] * dout, most.x, fabsf(delta[i])) * most.y;
  }
  constexpr float kRounding = 1.1f;  // safety factor, more than the rounding errors in p, ds and the addends
  bound = fminf(fmaxf(bound * kRounding, 1e-28f), 1e37f);
  *a.rounding_unit.at(b, t, head) = __int_as_float(__float_as_int(bound) & 0x7f800000);
}

// Calls f.template operator()<dk / 64>() for the head width dk.
template <class F>
void dispatch_norms(int64_t dk, F&& f) {
  dk == 64 ? f.template operator()<1>() : f.template operator()<2>();
}

}  // namespace

void compute_key_norms(Context& ctx, Tensor norms, int64_t tokens, int64_t head_width,
                       const std::vector<RoundingUnitBranch>& branches, const Documents& documents) {
  static_assert(kNormKeys == kKeyNormsChunk);
  NormArgs n{.groups = static_cast<int>(branches[0].k.size(2)),
             .norms = reinterpret_cast<float2*>(norms.data),
             .entries = static_cast<int>(norms.size(2)),
             .documents = document_view(documents, tokens)};
  for (size_t i = 0; i < branches.size(); ++i) {
    n.k[i] = make_view<const bf16>(branches[i].k), n.v[i] = make_view<const bf16>(branches[i].v);
    n.keys[i] = static_cast<int>(branches[i].k.size(1)), n.d[i] = static_cast<int>(branches[i].d);
  }
  if (!documents.empty()) zero(ctx, norms);
  const int64_t chunks = key_norms_shape(branches)[2];
  dispatch_norms(head_width, [&]<int kPanels>() {
    launch(ctx, "key_norms", bwd_key_norms_kernel<kPanels>, dim3(chunks, norms.size(0), kMostBranches),
           dim3(kNormThreads), 0, n);
  });
}

Tensor compute_rounding_unit(Context& ctx, Scratch::Scope& scope, ConstTensor dout, ConstTensor q,
                             const std::vector<RoundingUnitBranch>& branches, ConstTensor dout_norm,
                             ConstTensor key_norms, const Documents& documents) {
  const int64_t groups = branches[0].k.size(2), bgs = q.size(0) * groups, G = q.size(2) / groups;
  const auto heads = Divisor(static_cast<int>(G));
  const int rows = static_cast<int>(q.size(1) * G);
  const Tensor rounding_unit = scope.alloc(DType::f32, {q.size(0), q.size(1), q.size(2)});
  Scratch::Scope inner(ctx.scratch);
  if (key_norms.empty()) {
    const Tensor made = inner.alloc(DType::f32, key_norms_shape(branches, documents));
    compute_key_norms(ctx, made, q.size(1), q.size(3), branches, documents);
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
                     .entries = static_cast<int>(key_norms.size(2)),
                     .documents = document_view(documents, q.size(1)),
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
