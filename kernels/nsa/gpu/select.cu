// The portable selection (formula: nsa/select.h): selection block scores from the compressed branch's probabilities,
// then the best n blocks' list, in one kernel.
//
// A CTA computes 16 tokens in one sequence and group. Its 8 warps iterate over the compressed keys in tiles of 256, 32
// keys per warp:
//   1. A warp keeps its 32 keys in registers and loops over the group's heads. One head's product is M = 16 tokens by N
//      = 32 keys, so probabilities are summed over heads in registers, in head order, for any G. bf16: mma.m16n8k16
//      with fp32 sums; q is in shared memory in fragment order. f32: FFMA, a lane has one key.
//   2. In bf16, if l = 2 d and l' = 4 d, a lane usually has all but one of a block's keys, and it computes the block's
//      score in registers: score_blocks() in nsa/gpu/select_scores.cuh (select_portable() has all conditions).
//      Otherwise the warps store the sums to shared memory, and the thread for a token and block adds the key tile's
//      contribution, in key order: add_scores_of_heads(). Each score is written by one thread at a time, so there are
//      no atomics.
//   3. One warp per token writes its list: the first forced blocks, the best candidates, and the last forced blocks
//      (nsa/gpu/select_best.cuh).
//
// Scores are not computed for token tiles whose lists have room for all their blocks. Scores are fp32, one per block
// and token, in shared memory (68 KiB at T = 65536, l' = 64) or, if they do not fit, in scratch: one slab for each CTA,
// whose number is bounded.
//
// Work: T^2 / (2d) * Hq exponentials per sequence, and 2 dk FLOP for each; at head widths up to 64, two CTAs per SM
// overlap the two. q is read once; every CTA reads the compressed keys from L2.
#include <algorithm>
#include <cmath>

#include "kernels/common/shared_limits.h"
#include "kernels/nsa/gpu/select.h"
#include "kernels/nsa/gpu/select_scores.cuh"

namespace triad::cuda {
namespace {

constexpr int64_t kQueryBytes = 64 * 1024;    // q's bytes in shared memory, at most; more heads are loaded in turns
constexpr int64_t kSharedLimit = 160 * 1024;  // shared memory bytes per CTA, at most

// Writes the lists for a tile's tokens. The scores are computed first, unless every list has room for all blocks.
template <class T, int kHeld, bool kPoolsInRegisters>
__device__ __forceinline__ void select_tile(const Select<T>& s, const Shared& shared, const DocumentTile& tile) {
  const int end = tile.last - tile.begin;       // the last token's position
  const SelectionRule<int> last = s.rule(end);  // its candidates include the tile's other tokens'
  if (!last.lists_all()) {
    const int blocks = last.candidate_end, keys = min(s.visible(end), blocks * s.size);
    if constexpr (!kPoolsInRegisters)
      for (int i = threadIdx.x; i < blocks * kScoreStride; i += kThreads) shared.scores[i] = 0.0f;
    if (threadIdx.x < kTokens) {
      const int t = tile.first + static_cast<int>(threadIdx.x);
      shared.visible[threadIdx.x] = t <= tile.last ? s.visible(t - tile.begin) : 0;
    }
    for (int head0 = 0; head0 < s.heads; head0 += s.head_turn) {
      const int heads = min(s.head_turn, s.heads - head0);
      load_queries(s, shared, tile, head0, heads);
      __syncthreads();
      if constexpr (kPoolsInRegisters)
        score_blocks<kHeld>(s, s.k.row(tile.b, tile.first_key, tile.g), keys, blocks);
      else
        add_scores_of_heads<T, kHeld>(s, shared, tile, heads, keys, blocks);
    }
  }
  for (int i = threadIdx.x / 32; i <= tile.last - tile.first; i += kWarps) {
    const int t = tile.first + i;
    write_list<ProbabilityOrder>(s.block_index.row(tile.b, t, tile.g), s.n_sel, shared.scores + i,
                                 s.rule(t - tile.begin), tile.first_block,
                                 shared.candidates + threadIdx.x / 32 * kCandidates);
  }
  __syncthreads();  // all warps have read the scores before the next tile overwrites them
}

// The selection. Grid: one CTA per work item; if the scores are in scratch, a bounded number of CTAs, each computing
// several items.
template <class T, int kHeld, bool kPoolsInRegisters>
__global__ void __launch_bounds__(kThreads, kHeld <= 2 ? 2 : 1) select_kernel(const __grid_constant__ Select<T> s) {
  const Shared shared(s);
  for (int64_t item = blockIdx.x; item < s.items; item += gridDim.x) {
    const Tile whole(s, item);
    for (int first = whole.first; first <= whole.last;) {
      const DocumentTile tile(s, whole, first);
      select_tile<T, kHeld, kPoolsInRegisters>(s, shared, tile);
      first = tile.last + 1;
    }
  }
}

// Calls f.template operator()<kHeld>() for rows with `chunks` chunks. kHeld: how many chunks per key the registers
// hold, the least instantiated number that is at least `chunks`. It is 0 for rows that are too long or don't consist of
// 16-byte vectors; their chunks are loaded repeatedly.
template <class T, class F>
void dispatch_held(int64_t chunks, bool vectors, F&& f) {
  if (!vectors) return f.template operator()<0>();
  if (chunks <= 2) return f.template operator()<2>();
  if (chunks <= 4) return f.template operator()<4>();
  if constexpr (!std::is_same_v<T, float>) {
    if (chunks <= 6) return f.template operator()<6>();
    if (chunks <= 8) return f.template operator()<8>();
  }
  f.template operator()<0>();
}

}  // namespace

void select_portable(Context& ctx, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                     const SelectOptions& o, const Documents& documents) {
  const int64_t first = documents.part.first_query, tokens = first + q.size(1);
  const int64_t B = q.size(0), Hkv = k_cmp.size(2), dk = q.size(3), G = q.size(2) / Hkv;
  const auto as_int = [](int64_t count) { return static_cast<int>(std::min(count, kMaxSelectLength)); };
  ConstTensor lse = lse_cmp;  // [B,T,Hq,1]
  lse.rank = 4, lse.dim[3] = 1, lse.stride[3] = 1;
  dispatch_gpu_float(q.dtype, [&]<class T>() {
    const bool vectors = all_have_vectors(kVector<T>, q, k_cmp);
    dispatch_held<T>(ceil_div(dk, kChunk), vectors, [&]<int kHeld>() {
      const int64_t chunks = kHeld > 0 ? kHeld : ceil_div(dk, kChunk);
      const int64_t most = std::max<int64_t>(1, kQueryBytes / (chunks * QueryOrder<T>::kQueryPieces * 16));
      const int64_t head_turn = ceil_div(G, ceil_div(G, most));
      // score_blocks() needs rows in registers, four-key blocks in which each key overlaps the next one, all heads in
      // shared memory at once, carries that take no more memory than sums would, and a key stride that fits 32 bits.
      const int64_t carry_floats = ceil_div(k_cmp.size(1), kWarpKeys) * kTokens;
      const bool pools = !std::is_same_v<T, float> && kHeld > 0 && o.l == 2 * o.d && o.l_sel == 4 * o.d &&
                         head_turn == G && carry_floats <= kSumFloats && k_cmp.stride[1] <= INT32_MAX;
      const int64_t sum_floats = pools ? carry_floats : kSumFloats;
      const int64_t work_bytes = Shared::bytes<T>(head_turn, chunks, sum_floats);
      const int64_t score_floats = ceil_div(tokens * o.every, o.l_sel) * kScoreStride;
      const int64_t score_bytes = score_floats * static_cast<int64_t>(sizeof(float));
      const bool in_shared = work_bytes + score_bytes <= std::min(kSharedLimit, shared_limits(ctx).cta_bytes);
      const int64_t items = ceil_div(q.size(1), kTokens) * B * Hkv;
      const int64_t ctas = in_shared ? items : std::min<int64_t>(items, 2 * ctx.num_sms);

      Scratch::Scope scope(ctx.scratch);
      float* const slab = in_shared ? nullptr : scope.alloc(DType::f32, {ctas, score_floats}).ptr<float>();
      // Row t in these views belongs to token t; rows before the first query's don't exist.
      const auto from_first = [&](auto view) {
        view.data -= first * view.stride_t;
        return view;
      };
      const Select<T> s{.block_index = from_first(bthd<int32_t>(block_index)),
                        .q = from_first(bthd<T>(q)),
                        .k = bthd<T>(k_cmp),
                        .lse = from_first(bthd<float>(lse)),
                        .first_token = static_cast<int>(first),
                        .tokens = static_cast<int>(tokens),
                        .keys = static_cast<int>(k_cmp.size(1)),
                        .groups = static_cast<int>(Hkv),
                        .heads = static_cast<int>(G),
                        .dk = static_cast<int>(dk),
                        .l = static_cast<int>(o.l),
                        .d = static_cast<int>(o.d),
                        .l_sel = static_cast<int>(o.l_sel),
                        .n_sel = as_int(o.n_sel),
                        .init_blocks = as_int(o.init_blocks),
                        .local_blocks = as_int(o.local_blocks),
                        .every = as_int(o.every),
                        .span = static_cast<int>(o.l / o.d),
                        .size = static_cast<int>(o.l_sel / o.d),
                        .scale = kExpBase<T> / std::sqrt(static_cast<float>(dk)),
                        .vectors = vectors,
                        .chunks = static_cast<int>(chunks),
                        .head_turn = static_cast<int>(head_turn),
                        .sum_floats = static_cast<int>(sum_floats),
                        .items = items,
                        .sequences_and_groups = B * Hkv,
                        .slab = slab,
                        .slab_stride = score_floats,
                        .documents = document_view(documents, tokens)};
      const auto start = [&](auto kernel) {
        launch(ctx, "nsa_select", kernel, dim3(ctas), kThreads, work_bytes + (in_shared ? score_bytes : 0), s);
      };
      if constexpr (!std::is_same_v<T, float> && kHeld > 0)
        if (pools) return start(select_kernel<T, kHeld, true>);
      start(select_kernel<T, kHeld, false>);
    });
  });
}

}  // namespace triad::cuda
