// Block selection for one new token, the selected branch, and the combination of all branches: three dependent stages,
// each by 8 CTAs per (sequence, group):
//   1. select:  each CTA scores an eighth of the blocks and writes the best ones;
//   2. attend:  each CTA merges the eighths' best into the same list and attends to every 8th chunk (128 keys) in the
//               list;
//   3. combine:  each CTA computes an eighth of the outputs.
// On Hopper the 8 CTAs are a cluster with barriers between stages, which cost much less than another kernel. On other
// cards the stages are three kernels.
//
// To find the best n among a few hundred candidates, each candidate counts the greater ones. With 128 candidates that
// is 32 comparisons in each of 512 threads, without a barrier between them; n searches for the maximum were slower.
// Loops are unrolled only where loads should be in flight together: a step runs each kernel once, so its instructions
// come from L2.
#include <algorithm>

#include "kernels/common/launch_cluster.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/decode/decode.cuh"
#include "kernels/nsa/selection_rule.h"

namespace triad::cuda {
namespace {

constexpr int kWarps = kSelectThreads / 32;
constexpr int kMaxCandidates = kSelectThreads;
static_assert(kClusterCtas * kMaxSelected <= kMaxCandidates);

// A candidate: a block and its score as one integer, greater for blocks selected first: by higher score, then by lower
// index. It is never 0, since scores are not negative.
__device__ __forceinline__ uint64_t candidate_of(float score, int block) {
  const uint32_t order = __float_as_uint(score > 0 ? score : 0.0f) + 1;
  return uint64_t{order} << 32 | (0xffffffffu - static_cast<uint32_t>(block));
}
__device__ __forceinline__ int block_of(uint64_t candidate) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(candidate));
}

struct SelectMemory {
  uint64_t candidates[kMaxCandidates], best[kMaxSelected];
  int list[kMaxSelected];
  int rows[kSelectedChunk];  // the cache row for each key in a chunk
  float lse[kMaxHeads];      // each group head's log-sum-exp in base 2
  float sums[4];             // [compressed keys in a tile]: probabilities, summed over heads
};

// How the list for the token at position `at` is made: the forced blocks (first and local ones), and the `free` best
// other blocks.
struct ListPlan : SelectionRule<int> {
  int free;
  bool scored;  // whether scores decide: no list is given, and there are more candidates than free entries
  template <class T>
  __device__ ListPlan(const Decode<T>& a, int at)
      : SelectionRule<int>(at, a.l_sel, a.n_sel, a.init_blocks, a.local_blocks),
        free(min(candidates(), slots)),
        scored(a.given_lists(at) == nullptr && !lists_all() && free > 0) {}
  __device__ int listed() const { return init_end + free + current + 1 - local_begin; }
};

// memory.lse = each head's log-sum-exp in base 2 in the compressed branch, from the chunks' partial sums.
template <class T>
__device__ void combine_lse(const Decode<T>& a, SelectMemory& memory, int b, int g, int at) {
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

// Scores the blocks [j0, j1) and writes them as candidates. First sums over the heads the probabilities of compressed
// keys that overlap these blocks, then adds up each block's score from its keys.
template <class T>
__device__ void score_blocks(const Decode<T>& a, SelectMemory& memory, uint64_t* candidates, int b, int g, int at,
                             int j0, int j1) {
  const int visible = a.keys(0, at);
  const auto first_of = [&](int j) { return j * a.l_sel < a.l ? 0 : (j * a.l_sel - a.l) / a.d + 1; };
  const auto end_of = [&](int j) { return min(visible, ((j + 1) * a.l_sel - 1) / a.d + 1); };
  const float* const scores = a.scores + (int64_t{b} * a.Hq + g * a.G) * a.rows[0];
  const int c0 = first_of(j0), c1 = end_of(j1 - 1);
  // Loads for two keys and eight heads are in flight together.
#pragma unroll 1
  for (int c = c0 + threadIdx.x; c < c1; c += 2 * kSelectThreads) {
    const bool two = c + kSelectThreads < c1;
    float p[2] = {};
#pragma unroll 1
    for (int h0 = 0; h0 < a.G; h0 += 8) {
      float x[2][8];
#pragma unroll
      for (int h = 0; h < 8; ++h) {
        const float* const row = scores + int64_t{h0 + h} * a.rows[0] + c;
        x[0][h] = h0 + h < a.G ? row[0] - memory.lse[h0 + h] : -INFINITY;
        x[1][h] = two && h0 + h < a.G ? row[kSelectThreads] - memory.lse[h0 + h] : -INFINITY;
      }
#pragma unroll
      for (int h = 0; h < 8; ++h) p[0] += exp2_approx(x[0][h]), p[1] += exp2_approx(x[1][h]);
    }
    memory.sums[c - c0] = p[0];
    if (two) memory.sums[c + kSelectThreads - c0] = p[1];
  }
  __syncthreads();
  const float inverse_l = 1.0f / static_cast<float>(a.l);
#pragma unroll 1
  for (int j = j0 + threadIdx.x; j < j1; j += kSelectThreads) {
    const int low = j * a.l_sel, high = low + a.l_sel, last = end_of(j);
    float score = 0;
#pragma unroll 1
    for (int c = first_of(j); c < last; ++c) {
      const int shared = min(c * a.d + a.l, high) - max(c * a.d, low);
      score = fmaf(static_cast<float>(shared) * inverse_l, memory.sums[c - c0], score);
    }
    candidates[j - j0] = candidate_of(score, j);
  }
  __syncthreads();
}

// memory.best = the `most` greatest candidates in memory.candidates [0, n), in descending order; all if n < `most`. A 0
// candidate is an empty entry.
__device__ __noinline__ void best_of(SelectMemory& memory, int n, int most) {
  const int lanes = n > 256 ? 1 : n > 128 ? 2 : n > 64 ? 4 : n > 32 ? 8 : 16;  // lanes per candidate
  const int i = threadIdx.x / lanes, part = threadIdx.x % lanes;
  const uint64_t mine = i < n ? memory.candidates[i] : 0;
  int before = 0;
#pragma unroll 8
  for (int j = part; j < n; j += lanes) before += memory.candidates[j] > mine;
#pragma unroll 1
  for (int o = lanes / 2; o > 0; o /= 2) before += __shfl_xor_sync(kFullWarp, before, o);
  if (part == 0 && mine != 0 && before < most) memory.best[before] = mine;
  __syncthreads();
}

// Writes the best blocks in this CTA's share of the candidates to a.best.
template <class T>
__device__ void select_share(const Decode<T>& a, const ListPlan& plan, SelectMemory& memory, int b, int g, int at) {
  const int share = ceil_div(plan.candidate_end - plan.init_end, kClusterCtas);
  const int begin = plan.init_end + static_cast<int>(blockIdx.x) * share, end = min(plan.candidate_end, begin + share);
  int kept = 0;
  combine_lse(a, memory, b, g, at);
#pragma unroll 1
  for (int j0 = begin; j0 < end; j0 += a.tile_blocks) {  // the candidates are the best so far, then the next blocks
    const int j1 = min(end, j0 + a.tile_blocks), n = kept + j1 - j0;
    if (static_cast<int>(threadIdx.x) < kept) memory.candidates[threadIdx.x] = memory.best[threadIdx.x];
    score_blocks(a, memory, memory.candidates + kept, b, g, at, j0, j1);
    best_of(memory, n, plan.free);
    kept = min(plan.free, n);
  }
  uint64_t* const best = a.best + ((int64_t{b} * a.Hkv + g) * kClusterCtas + blockIdx.x) * a.n_sel;
  if (const int r = threadIdx.x; r < plan.free) best[r] = r < kept ? memory.best[r] : 0;
}

// Merges all shares' best, or reads the given list, and writes the selected blocks to memory.list in ascending order.
// Lists that the next tokens share are stored by the first CTA.
template <class T>
__device__ void list_blocks(const Decode<T>& a, const ListPlan& plan, SelectMemory& memory, int b, int g, int at) {
  const int r = threadIdx.x;
  const int64_t list = (int64_t{b} * a.Hkv + g) * a.n_sel;
  if (const int32_t* const given = a.given_lists(at); given != nullptr) {
    if (r < plan.listed()) memory.list[r] = given[list + r];
    __syncthreads();
    return;
  }
  int* const free = memory.list + plan.init_end;
  if (plan.scored) {
    const uint64_t* const best = a.best + (int64_t{b} * a.Hkv + g) * kClusterCtas * a.n_sel;
    if (r < kClusterCtas * plan.free) memory.candidates[r] = __ldcg(best + r / plan.free * a.n_sel + r % plan.free);
    __syncthreads();
    best_of(memory, kClusterCtas * plan.free, plan.free);
    if (r < plan.free) {
      const int block = block_of(memory.best[r]);
      int rank = 0;
#pragma unroll 4
      for (int i = 0; i < plan.free; ++i) rank += block_of(memory.best[i]) < block;
      free[rank] = block;
    }
  } else if (r < plan.free) {
    free[r] = plan.init_end + r;
  }
  if (r < plan.init_end) memory.list[r] = r;
  if (r <= plan.current - plan.local_begin) free[plan.free + r] = plan.local_begin + r;
  __syncthreads();
  if (a.shared_lists != nullptr && blockIdx.x == 0 && r < a.n_sel)
    a.shared_lists[list + r] = r < plan.listed() ? memory.list[r] : -1;
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
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(dynamic_shared());
  const int g = blockIdx.y, b = blockIdx.z, at = a.position[b];
  const ListPlan plan(a, at);
  if (plan.scored) select_share(a, plan, memory, b, g, at);
}

// kAll: the CTAs are a cluster and compute the three stages select, attend and combine; otherwise only attend.
template <class T, int V, int kHeads, bool kAll>
__global__ void __launch_bounds__(kSelectThreads, 1) decode_selected_kernel(Decode<T> a) {
  if constexpr (kAll) pdl_wait();
  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(shared + chunk_floats<kHeads>(a.G, a.dk));
  const SelectedChunk<kHeads> chunk_memory(shared, a.G, a.dk);
  const int g = blockIdx.y, b = blockIdx.z, at = a.position[b];
  if (a.run[1]) {
    const ListPlan plan(a, at);
    load_queries(a, chunk_memory, b, g);
    if (kAll && plan.scored) {
      select_share(a, plan, memory, b, g, at);
      sync_cluster();
    }
    list_blocks(a, plan, memory, b, g, at);
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
  const size_t select = sizeof(SelectMemory) + tile;
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
  if (!vectors)
    launch_for<T, 1, 2>(ctx, a);
  else if (a.G <= 2)
    launch_for<T, kVector<T>, 2>(ctx, a);
  else
    launch_for<T, kVector<T>, 8>(ctx, a);
}
template void launch_selected(Context&, const Decode<float>&, bool);
template void launch_selected(Context&, const Decode<__nv_bfloat16>&, bool);

}  // namespace triad::cuda
