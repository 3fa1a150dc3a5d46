// NSA's attention for one new token per sequence in bf16, with heads of 64 or 128, as one kernel on tensor cores
// (decode/decode_mma.cuh): one CTA for each (sequence, group), so that nothing is split and no partial sums pass
// through memory. Of few sequences on Hopper, whose CTAs would leave most of the card idle, the 8 CTAs of a cluster, 16
// where caches are long, share each branch's tiles and then the outputs. A CTA computes:
//   1. the compressed branch, whose scores it stores for the selection, while the window's rows begin to come to L2;
//   2. the gate, and the heads' log-sum-exp;
//   3. the selection (decode/decode_select.cuh);
//   4. the selected and the window branch, and the sum of all branches by their gates, rounded as in the forward pass.
// A CTA's warps share its tiles, so the sums' order depends on the number of warps: with heads of 64 it is 16, one CTA
// on an SM, in clusters and where kWideSequences sequences or fewer have few groups; else 8, so that two CTAs on an SM
// fill each other's pauses. It depends on the number of sequences, on clusters and on the card, not on what the
// sequences are.
#include <algorithm>

#include "kernels/common/launch_cluster.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/decode/decode_gate.cuh"
#include "kernels/decode/decode_mma.cuh"
#include "kernels/decode/decode_select.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;
constexpr int kWideSequences = 64, kWideGroups = 4;  // most sequences, and groups, for which a CTA has 16 warps
constexpr int kMostClusters = 14;                    // more of 8 CTAs, each alone on its SM, do not run at once
constexpr int kLongCache = 8192;                     // compressed keys; with as many, a cluster has 16 CTAs

// Where the parts of a CTA's shared memory begin, in bytes: the warps' sums of the compressed and then the selected
// branch, those of the window branch, the CTA's totals, the gate and the selection.
template <int kDv, int kWarps>
struct ManyLayout {
  int window, totals, gate, select, size;
  __host__ __device__ ManyLayout(const Decode<bf16>& a, int gate_floats) {
    constexpr int kFloat = static_cast<int>(sizeof(float));
    window = WarpSums<kWarps, kDv>::bytes(a.G);
    totals = 2 * window;
    gate = totals + kFloat * 3 * (a.G * kDv + 2 * kTileHeads);
    select = round_up(gate + kFloat * gate_floats, 16);
    const int tile = a.tile_blocks * ceil_div(a.l_sel, a.d) + ceil_div(a.l, a.d);
    size = select + static_cast<int>(sizeof(SelectMemory<32 * kWarps>)) + kFloat * tile;
  }
};

// Each branch's totals of a CTA in shared memory, and those of a cluster.
template <int kDv>
struct CtaTotals {
  float* memory;
  int G;
  struct Total {
    float max, sum, o;
  };
  __device__ float* max_of(int branch, int head) const { return memory + (2 * branch) * kTileHeads + head; }
  __device__ float* sum_of(int branch, int head) const { return memory + (2 * branch + 1) * kTileHeads + head; }
  __device__ float* o_of(int branch, int i) const { return memory + 6 * kTileHeads + branch * G * kDv + i; }

  template <int kThreads, int kWarps>
  __device__ void store(int branch, const WarpSums<kWarps, kDv>& sums) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < G * kDv; i += kThreads) {
      const auto total = sums.total(G, i);
      const bool any = total.max > -INFINITY;  // whether this CTA has keys
      *o_of(branch, i) = any ? total.o : 0;
      if (i % kDv == 0) *max_of(branch, i / kDv) = total.max, *sum_of(branch, i / kDv) = any ? total.sum : 0;
    }
  }
  // Adds the totals of the cluster's CTAs in order: for output i, or for a head without o.
  template <int kCtas, bool kWithO>
  __device__ Total total(int branch, int head, int i) const {
    const auto load = [](const float* p, int cta) { return kCtas == 1 ? *p : load_from_cta(p, cta); };
    Total all = {-INFINITY, 0, 0};
#pragma unroll
    for (int s = 0; s < kCtas; ++s) all.max = fmaxf(all.max, load(max_of(branch, head), s));
#pragma unroll
    for (int s = 0; s < kCtas; ++s) {
      const float weight = exp2_approx(load(max_of(branch, head), s) - all.max);
      all.sum = fmaf(load(sum_of(branch, head), s), weight, all.sum);
      if (kWithO) all.o = fmaf(load(o_of(branch, i), s), weight, all.o);
    }
    return all;
  }
};

// Requests a branch's first rows of 128-byte lines from memory, before they are needed.
template <int kThreads, int kWidth>
__device__ void request_rows(const bf16* rows, int64_t stride, int count) {
  constexpr int kLine = 64;  // elements
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); i < count * (kWidth / kLine);
       i += static_cast<int>(gridDim.x) * kThreads)
    prefetch_l2(rows + i / (kWidth / kLine) * stride + i % (kWidth / kLine) * kLine);
}

// blockIdx.x: the CTA's place in its cluster of kCtas, which share the tiles and then the outputs.
template <int kDk, int kDv, int kWarps, int kCtas>
__global__ void __launch_bounds__(32 * kWarps, kDk + kDv <= 128 ? 16 / kWarps : 1)
    decode_many_kernel(Decode<bf16> a, GateMlp<bf16> mlp, GateKernelOptions gate_options) {
  constexpr int kThreads = 32 * kWarps;
  constexpr bool kCluster = kCtas > 1;
  const int cta = kCluster ? static_cast<int>(blockIdx.x) : 0;
  unsigned char* const shared = dynamic_shared();
  const ManyLayout<kDv, kWarps> layout(a, gate_options.computed() ? GateMemory<bf16, true>::floats(mlp) : 0);
  auto& sums = *reinterpret_cast<WarpSums<kWarps, kDv>*>(shared);
  auto& window_sums = *reinterpret_cast<WarpSums<kWarps, kDv>*>(shared + layout.window);
  const CtaTotals<kDv> totals{reinterpret_cast<float*>(shared + layout.totals), a.G};
  auto& select = *reinterpret_cast<SelectMemory<kThreads>*>(shared + layout.select);
  const GateMemory<bf16, true> gate_memory(reinterpret_cast<float*>(shared + layout.gate), mlp);
  const auto sync = [] { kCluster ? sync_cluster() : __syncthreads(); };
  if (gate_options.computed()) load_gate_weights<kThreads>(mlp, gate_memory);
  pdl_wait();
  const int g = blockIdx.y, b = blockIdx.z, at = a.position[b];
  int keys[3];
#pragma unroll
  for (int branch = 0; branch < 3; ++branch) keys[branch] = a.run[branch] ? a.keys(branch, at) : 0;
  const auto same_row = [](int, int i) { return i; };
  const auto keep_none = [](int, int, float) {};

  TileAttention<kDk, kDv> attention;
  attention.load_queries(a.q.row(b, 0, int64_t{g} * a.G), a.q.stride_h, a.G);
  const auto attend = [&](int branch, auto&& row_of, auto&& keep) {
    const int first = (cta * kWarps + static_cast<int>(threadIdx.x) / 32) * kTileKeys;
    attention.attend(a.k[branch].row(b, 0, g), a.k[branch].stride_t, a.v[branch].row(b, 0, g), a.v[branch].stride_t,
                     first, kCtas * kWarps * kTileKeys, keys[branch], a.scale_log2, row_of, keep);
  };
  float* const scores = a.scores + (int64_t{b} * a.Hq + g * a.G) * a.rows[0];
  attend(0, same_row, [&](int head, int key, float score) {
    if (head < a.G) scores[int64_t{head} * a.rows[0] + key] = score;
  });
  attention.store(sums, a.G);
  request_rows<kThreads, kDk>(a.k[2].row(b, 0, g), a.k[2].stride_t, keys[2]);
  request_rows<kThreads, kDv>(a.v[2].row(b, 0, g), a.v[2].stride_t, keys[2]);
  gate_of<kThreads>(a, mlp, gate_options, gate_memory, b, g);
  __syncthreads();
  totals.template store<kThreads>(0, sums);
  sync();

  if (a.run[1]) {
    if (const int h = threadIdx.x; keys[0] > 0 && h < a.G) {
      const auto total = totals.template total<kCtas, false>(0, h, 0);
      select.lse[h] = total.max + log2f(total.sum);
    }
    __syncthreads();
    const ListPlan plan(a, at);
    list_blocks(a, plan, select, b, g, at, [&] {
      // Every CTA selects among few candidates, and its share of many.
      if (!kCluster || plan.candidates() <= kThreads / 2) {
        select_range(a, plan, select, b, g, at, plan.init_end, plan.candidate_end);
      } else {
        select_share(a, plan, select, b, g, at);
        sync();
        merge_shares(a, plan, select, b, g);
      }
    });
    // The listed blocks' tokens are numbered as consecutive keys; only the last block may be incomplete.
    attend(1, ListedRows{select.list, a.l_sel}, keep_none);
    attention.store(sums, a.G);
  }
  attend(2, same_row, keep_none);
  attention.store(window_sums, a.G);
  pdl_trigger();
  __syncthreads();
  if (a.run[1]) totals.template store<kThreads>(1, sums);
  totals.template store<kThreads>(2, window_sums);
  sync();

  float gates[3];
#pragma unroll
  for (int branch = 0; branch < 3; ++branch) gates[branch] = a.gate[(branch * a.B + b) * a.Hkv + g];
  const int outputs = a.G * kDv, share = ceil_div(outputs, kCtas), end = min(outputs, (cta + 1) * share);
#pragma unroll 1
  for (int i = cta * share + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    float out = 0;
#pragma unroll
    for (int branch = 0; branch < 3; ++branch) {
      if (keys[branch] == 0) continue;
      const auto total = totals.template total<kCtas, true>(branch, i / kDv, i);
      out = fmaf(gates[branch], to_float(from_float<bf16>(total.o / total.sum)), out);
    }
    a.out[(int64_t{b} * a.Hq + g * a.G) * kDv + i] = from_float<bf16>(out);
  }
  if (a.reads != nullptr && cta == 0 && threadIdx.x < 3)
    atomicAdd(a.reads + threadIdx.x, static_cast<unsigned long long>(a.run[threadIdx.x] ? a.keys(threadIdx.x, at) : 0));
  if (kCluster) sync_cluster();  // a CTA's shared memory lasts until all CTAs have read it
}

template <int kDk, int kDv, int kWarps, int kCtas = 1>
bool launch_for(Context& ctx, Decode<bf16> a, const GateMlp<bf16>& mlp, const GateKernelOptions& gate) {
  a.tile_blocks = tile_blocks(a.l_sel, a.d, std::min(32 * kWarps - kMaxSelected, ceil_div(a.rows[1], a.l_sel)));
  const ManyLayout<kDv, kWarps> layout(a, gate.computed() ? GateMemory<bf16, true>::floats(mlp) : 0);
  if (layout.size > shared_limits(ctx).cta_bytes || (kCtas > 1 && kCtas * a.n_sel > 32 * kWarps)) return false;
  const dim3 grid(kCtas, static_cast<unsigned>(a.Hkv), static_cast<unsigned>(a.B));
  const auto kernel = decode_many_kernel<kDk, kDv, kWarps, kCtas>;
  const dim3 block(32 * kWarps);
  const size_t bytes = static_cast<size_t>(layout.size);
  if (kCtas > kClusterCtas && !ctx.planning &&
      clusters_at_once(ctx.device.index, kernel, kCtas, block.x, bytes) < a.B * a.Hkv)
    return false;
  if constexpr (kCtas > 1)
    launch_cluster_pdl(ctx, "nsa_decode cluster", kernel, grid, block, bytes, a, mlp, gate);
  else
    launch_pdl(ctx, "nsa_decode many", kernel, grid, block, bytes, a, mlp, gate);
  return true;
}

}  // namespace

bool launch_many(Context& ctx, const Decode<bf16>& a, bool vectors, const GateMlp<bf16>& mlp,
                 const GateKernelOptions& gate) {
  if (!vectors || a.G > kTileHeads || a.l_sel < kTileKeys) return false;
  const bool heads_of_64 = a.dk == 64 && a.dv == 64, heads_of_128 = a.dk == 128 && a.dv == 128;
  if (!heads_of_64 && !heads_of_128) return false;
  if (a.B <= kFewSequences && !ctx.may_use_sm90()) return false;
  if (a.B <= kFewSequences && a.B * a.Hkv <= kMostClusters) {
    if (a.rows[0] >= kLongCache && (heads_of_64 ? launch_for<64, 64, 16, kWideClusterCtas>(ctx, a, mlp, gate)
                                                : launch_for<128, 128, 8, kWideClusterCtas>(ctx, a, mlp, gate)))
      return true;
    return heads_of_64 ? launch_for<64, 64, 16, kClusterCtas>(ctx, a, mlp, gate)
                       : launch_for<128, 128, 8, kClusterCtas>(ctx, a, mlp, gate);
  }
  if (heads_of_128) return launch_for<128, 128, 8>(ctx, a, mlp, gate);
  const bool wide = a.B <= kWideSequences && a.Hkv <= kWideGroups;
  return (wide && launch_for<64, 64, 16>(ctx, a, mlp, gate)) || launch_for<64, 64, 8>(ctx, a, mlp, gate);
}

}  // namespace triad::cuda
