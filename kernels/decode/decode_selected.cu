// Block selection for one new token, the selected branch, and the combination of all branches: three dependent stages,
// each by 8 CTAs per (sequence, group):
//   1. select:  each CTA scores an eighth of the blocks and writes the best ones;
//   2. attend:  each CTA merges the eighths' best into the same list and attends to every 8th chunk (128 keys) in the
//               list;
//   3. combine:  each CTA computes an eighth of the outputs.
// On Hopper the 8 CTAs are a cluster with barriers between stages, which cost much less than another kernel. On other
// cards the stages are three kernels.
// Loops are unrolled only where loads should be in flight together: a step runs each kernel once, so its instructions
// come from L2.
#include <algorithm>

#include "kernels/common/launch_cluster.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/decode/decode_select.cuh"

namespace triad::cuda {
namespace {

constexpr int kWarps = kSelectThreads / 32;
using Memory = SelectMemory<kSelectThreads>;
static_assert(kClusterCtas * kMaxSelected <= kSelectThreads);

// memory.lse = each head's log-sum-exp in base 2 in the compressed branch, from the chunks' partial sums.
template <class T>
__device__ void combine_lse(const Decode<T>& a, Memory& memory, int b, int g, int at) {
  const int chunks = ceil_div(a.keys(0, at), kBranchChunk), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float2* const parts = a.partial_sum + a.partial(b, g, 0, 0);
#pragma unroll 1
  for (int h = warp; h < a.G; h += kWarps) {
    float max = -INFINITY, sum = 0;
#pragma unroll 2
    for (int c = lane; c < chunks; c += 32) {
      const float2 part = parts[int64_t{c} * a.G + h];
      const float new_max = fmaxf(max, part.x);
      sum = fmaf(part.y, exp2_approx(part.x - new_max), sum * exp2_approx(max - new_max));
      max = new_max;
    }
    const float all = warp_max(max);
    sum = warp_sum(sum * exp2_approx(max - all));
    if (lane == 0) memory.lse[h] = all + log2f(sum);
  }
  __syncthreads();
}

// The kernel's shared memory: first a chunk's, which the combination reuses, then the selection's.
template <int kHeads>
using SelectedChunk = ChunkMemory<kHeads, kSelectThreads, kSelectedChunk>;
template <int kHeads>
__host__ __device__ int chunk_floats(int G, int dk) {
  const int combine = static_cast<int>(sizeof(CombineMemory<3, kSelectThreads>) / sizeof(float));
  const int chunk = SelectedChunk<kHeads>::floats(G, dk);
  return round_up(chunk > combine ? chunk : combine, 4);
}

template <class T>
__global__ void __launch_bounds__(kSelectThreads, 1) decode_select_kernel(Decode<T> a) {
  Memory& memory = *reinterpret_cast<Memory*>(dynamic_shared());
  const int g = blockIdx.y, b = blockIdx.z, at = a.position[b];
  const ListPlan plan(a, at);
  if (!plan.scored) return;
  combine_lse(a, memory, b, g, at);
  select_share(a, plan, memory, b, g, at);
}

// kAll: the CTAs are a cluster and compute the three stages select, attend and combine; otherwise only attend.
template <class T, int V, int kHeads, bool kAll>
__global__ void __launch_bounds__(kSelectThreads, 1) decode_selected_kernel(Decode<T> a) {
  if constexpr (kAll) pdl_wait();
  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  Memory& memory = *reinterpret_cast<Memory*>(shared + chunk_floats<kHeads>(a.G, a.dk));
  const SelectedChunk<kHeads> chunk_memory(shared, a.G, a.dk);
  const int g = blockIdx.y, b = blockIdx.z, at = a.position[b];
  if (a.run[1]) {
    const ListPlan plan(a, at);
    load_queries(a, chunk_memory, b, g);
    if (kAll && plan.scored) {
      combine_lse(a, memory, b, g, at);
      select_share(a, plan, memory, b, g, at);
      sync_cluster();
    }
    list_blocks(a, plan, memory, b, g, at, [&] { merge_shares(a, plan, memory, b, g); });
    // The listed blocks' tokens are numbered as consecutive keys; only the last block may be incomplete.
    const int keys = (plan.listed() - 1) * a.l_sel + at % a.l_sel + 1;
#pragma unroll 1
    for (int chunk = blockIdx.x; chunk * kSelectedChunk < keys; chunk += kClusterCtas) {
      const int first = chunk * kSelectedChunk, count = min(kSelectedChunk, keys - first);
      if (const int i = threadIdx.x; i < count)
        memory.rows[i] = memory.list[(first + i) / a.l_sel] * a.l_sel + (first + i) % a.l_sel;
      __syncthreads();
      attend_chunk<false, V>(
          a, chunk_memory, 1, chunk, b, g, count, [&](int i) { return memory.rows[i]; }, nullptr, 0);
    }
  }
  if constexpr (kAll) {
    pdl_trigger();
    sync_cluster();
    const int outputs = a.G * a.dv, share = ceil_div(outputs, kClusterCtas),
              begin = static_cast<int>(blockIdx.x) * share;
    combine_chunks(a, *reinterpret_cast<CombineMemory<3, kSelectThreads>*>(shared), b, g, begin,
                   min(outputs, begin + share));
  }
}

template <class T, int V, int kHeads>
void launch_for(Context& ctx, const Decode<T>& a) {
  const dim3 grid(kClusterCtas, static_cast<unsigned>(a.Hkv), static_cast<unsigned>(a.B)), block(kSelectThreads);
  const size_t tile = sizeof(float) * static_cast<size_t>(a.tile_blocks * ceil_div(a.l_sel, a.d) + ceil_div(a.l, a.d));
  const size_t select = sizeof(Memory) + tile;
  const size_t all = sizeof(float) * static_cast<size_t>(chunk_floats<kHeads>(a.G, a.dk)) + select;
  check_shared(ctx, "nsa_decode", static_cast<int64_t>(all), "{} heads a group of dk = {}", a.G, a.dk);
  if (ctx.may_use_sm90())
    return launch_cluster_pdl(ctx, "nsa_decode selected", decode_selected_kernel<T, V, kHeads, true>, grid, block, all,
                              a);
  if (a.run[1]) {
    launch(ctx, "nsa_decode select", decode_select_kernel<T>, grid, block, select, a);
    launch(ctx, "nsa_decode selected", decode_selected_kernel<T, V, kHeads, false>, grid, block, all, a);
  }
  launch_combine(ctx, "nsa_decode combine", a);
}

}  // namespace

template <class T>
void launch_selected(Context& ctx, const Decode<T>& a, bool vectors) {
  dispatch_chunks<T>(a.G, vectors, [&]<int V, int kHeads>() { launch_for<T, V, kHeads>(ctx, a); });
}
template void launch_selected(Context&, const Decode<float>&, bool);
template void launch_selected(Context&, const Decode<__nv_bfloat16>&, bool);

}  // namespace triad::cuda
