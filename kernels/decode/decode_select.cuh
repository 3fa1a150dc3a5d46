// Block selection for one new token, by a CTA: scores for blocks, the best among many, and the list.
//
// To find the best n among a hundred candidates, each candidate counts the greater ones. With 128 candidates that is 32
// comparisons in each of 512 threads, without a barrier between them; n searches for the maximum were slower. Of more
// candidates, if n is at most half of a warp, each warp first keeps the best n of its own 32.
#pragma once
#include "kernels/decode/decode.cuh"
#include "kernels/nsa/selection_rule.h"

namespace triad::cuda {

// A candidate: a block and its score as one integer, greater for blocks selected first: by higher score, then by lower
// index. It is never 0, since scores are not negative.
__device__ __forceinline__ uint64_t candidate_of(float score, int block) {
  const uint32_t order = __float_as_uint(score > 0 ? score : 0.0f) + 1;
  return uint64_t{order} << 32 | (0xffffffffu - static_cast<uint32_t>(block));
}
__device__ __forceinline__ int block_of(uint64_t candidate) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(candidate));
}

template <int kThreads_>
struct SelectMemory {
  static constexpr int kThreads = kThreads_;
  uint64_t candidates[kThreads], best[kMaxSelected];
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

// Scores the blocks [j0, j1) and writes them as candidates. First sums over the heads the probabilities of compressed
// keys that overlap these blocks, then adds up each block's score from its keys.
template <int kThreads, class T>
__device__ void score_blocks(const Decode<T>& a, SelectMemory<kThreads>& memory, uint64_t* candidates, int b, int g,
                             int at, int j0, int j1) {
  const int visible = a.keys(0, at);
  const auto first_of = [&](int j) { return j * a.l_sel < a.l ? 0 : (j * a.l_sel - a.l) / a.d + 1; };
  const auto end_of = [&](int j) { return min(visible, ((j + 1) * a.l_sel - 1) / a.d + 1); };
  const float* const scores = a.scores + (int64_t{b} * a.Hq + g * a.G) * a.rows[0];
  const int c0 = first_of(j0), c1 = end_of(j1 - 1);
  // Loads for two keys and eight heads are in flight together.
#pragma unroll 1
  for (int c = c0 + threadIdx.x; c < c1; c += 2 * kThreads) {
    const bool two = c + kThreads < c1;
    float p[2] = {};
#pragma unroll 1
    for (int h0 = 0; h0 < a.G; h0 += 8) {
      float x[2][8];
#pragma unroll
      for (int h = 0; h < 8; ++h) {
        const float* const row = scores + int64_t{h0 + h} * a.rows[0] + c;
        x[0][h] = h0 + h < a.G ? __ldcg(row) - memory.lse[h0 + h] : -INFINITY;
        x[1][h] = two && h0 + h < a.G ? __ldcg(row + kThreads) - memory.lse[h0 + h] : -INFINITY;
      }
#pragma unroll
      for (int h = 0; h < 8; ++h) p[0] += exp2_approx(x[0][h]), p[1] += exp2_approx(x[1][h]);
    }
    memory.sums[c - c0] = p[0];
    if (two) memory.sums[c + kThreads - c0] = p[1];
  }
  __syncthreads();
  const float inverse_l = 1.0f / static_cast<float>(a.l);
#pragma unroll 1
  for (int j = j0 + threadIdx.x; j < j1; j += kThreads) {
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

// Keeps the `most` (at most 32) greatest of each 32 candidates in memory.candidates [0, n), and returns how many
// entries remain; empty ones are 0.
template <int kThreads>
__device__ int best_of_warps(SelectMemory<kThreads>& memory, int n, int most) {
  const int i = threadIdx.x, first = i / 32 * 32, end = min(n, first + 32), to = i / 32 * most;
  const uint64_t mine = i < n ? memory.candidates[i] : 0;
  int before = 0;
#pragma unroll 8
  for (int j = first; j < end; ++j) before += memory.candidates[j] > mine;
  __syncthreads();
  if (first < n && i % 32 < most) memory.candidates[to + i % 32] = 0;
  __syncwarp();
  if (mine != 0 && before < most) memory.candidates[to + before] = mine;
  __syncthreads();
  return ceil_div(n, 32) * most;
}

// memory.best = the `most` greatest candidates in memory.candidates [0, n), in descending order; all if n < `most`. A 0
// candidate is an empty entry.
template <int kThreads>
__device__ __noinline__ void best_of(SelectMemory<kThreads>& memory, int n, int most) {
  constexpr int kMostOfWarp = 16;  // a warp that keeps more drops less than half
  if (n > kThreads / 4 && most <= kMostOfWarp) n = best_of_warps(memory, n, most);
  // Lanes per candidate.
  const int lanes = n > kThreads / 2 ? 1 : n > kThreads / 4 ? 2 : n > kThreads / 8 ? 4 : n > kThreads / 16 ? 8 : 16;
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

// memory.best = the best plan.free blocks in [begin, end), or all if there are fewer; returns how many. memory.lse must
// be there.
template <int kThreads, class T>
__device__ int select_range(const Decode<T>& a, const ListPlan& plan, SelectMemory<kThreads>& memory, int b, int g,
                            int at, int begin, int end) {
  int kept = 0;
#pragma unroll 1
  for (int j0 = begin; j0 < end; j0 += a.tile_blocks) {  // the candidates are the best so far, then the next blocks
    const int j1 = min(end, j0 + a.tile_blocks), n = kept + j1 - j0;
    if (static_cast<int>(threadIdx.x) < kept) memory.candidates[threadIdx.x] = memory.best[threadIdx.x];
    score_blocks(a, memory, memory.candidates + kept, b, g, at, j0, j1);
    best_of(memory, n, plan.free);
    kept = min(plan.free, n);
  }
  return kept;
}

// Writes to a.best the best blocks in this CTA's share of the candidates, which the CTAs along x divide. memory.lse
// must be there.
template <int kThreads, class T>
__device__ void select_share(const Decode<T>& a, const ListPlan& plan, SelectMemory<kThreads>& memory, int b, int g,
                             int at) {
  const int share = ceil_div(plan.candidates(), static_cast<int>(gridDim.x));
  const int begin = plan.init_end + static_cast<int>(blockIdx.x) * share, end = min(plan.candidate_end, begin + share);
  const int kept = select_range(a, plan, memory, b, g, at, begin, end);
  uint64_t* const best = a.best + ((int64_t{b} * a.Hkv + g) * gridDim.x + blockIdx.x) * a.n_sel;
  if (const int r = threadIdx.x; r < plan.free) best[r] = r < kept ? memory.best[r] : 0;
}

// memory.best = the best blocks in all shares. There are as many threads as blocks in the shares.
template <int kThreads, class T>
__device__ void merge_shares(const Decode<T>& a, const ListPlan& plan, SelectMemory<kThreads>& memory, int b, int g) {
  const uint64_t* const best = a.best + (int64_t{b} * a.Hkv + g) * gridDim.x * a.n_sel;
  const int n = static_cast<int>(gridDim.x) * plan.free;
  if (const int r = threadIdx.x; r < n) memory.candidates[r] = __ldcg(best + r / plan.free * a.n_sel + r % plan.free);
  __syncthreads();
  best_of(memory, n, plan.free);
}

// Writes the selected blocks to memory.list in ascending order: the given list's, or the forced blocks and, where
// scores decide, memory.best, which find_best() writes, with a barrier behind it. Lists that the next tokens share are
// stored by the first CTA. A barrier comes last.
template <int kThreads, class T, class FindBest>
__device__ void list_blocks(const Decode<T>& a, const ListPlan& plan, SelectMemory<kThreads>& memory, int b, int g,
                            int at, FindBest&& find_best) {
  const int r = threadIdx.x;
  const int64_t list = (int64_t{b} * a.Hkv + g) * a.n_sel;
  if (const int32_t* const given = a.given_lists(at); given != nullptr) {
    if (r < plan.listed()) memory.list[r] = given[list + r];
    __syncthreads();
    return;
  }
  int* const free = memory.list + plan.init_end;
  if (plan.scored) {
    find_best();
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

}  // namespace triad::cuda
