// The portable selection by a taught index (nsa/select_index.h): a block's score is the largest product of a query with
// one of its keys; then the list of the best n blocks, in one kernel.
//
// A CTA computes 16 tokens of one sequence and group, those of one document after those of another. Its 4 warps
// multiply the 16 queries with 32 keys each (f32: 16) at a time, in chunks of 64 columns; the products go through
// shared memory, where one thread takes the maximum of a token's keys in each block. One warp then writes a token's
// list (nsa/gpu/select_best.cuh). Scores are fp32, one per block and token, in shared memory or, if they do not fit, in
// scratch: one slab for each of a bounded number of CTAs. They lack the factor 1 / sqrt(di), which keeps their order.
//
// Tiles of tokens whose lists have room for all of their blocks compute no scores. Bound: loads of keys from L2.
#include <algorithm>

#include "kernels/common/bthd.cuh"
#include "kernels/common/documents.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/nsa/gpu/attend.cuh"
#include "kernels/nsa/gpu/select.h"
#include "kernels/nsa/gpu/select_best.cuh"
#include "kernels/nsa/gpu/select_index.h"

namespace triad::cuda {
namespace {

constexpr int kTokens = 16;                   // tokens of a tile: the M of one mma
constexpr int64_t kSharedLimit = 160 * 1024;  // bytes of shared memory per CTA, at most

template <class T>
struct SelectIndex {
  View<const T> q, k;             // row t of q is that of token t
  View<int32_t> block_index;      // likewise
  int first_token, tokens, keys;  // the tokens that have queries; rows of k
  int groups, depth;              // Hkv; di, rounded up to a multiple of kDepth
  int l_sel, n_sel, init_blocks, local_blocks;
  int every;      // row t of q and block_index is that of token every * t (nsa/gpu/share_lists.h)
  int64_t items;  // one per tile of 16 tokens, sequence and group
  int64_t sequences_and_groups;
  float* slab;  // [CTAs, slab_stride]: scores; nullptr: they are in shared memory
  int64_t slab_stride;
  DocumentView documents;
  __device__ SelectionRule<int> rule(int t) const { return {t * every, l_sel, n_sel, init_blocks, local_blocks}; }
};

// The keys that a warp and a CTA multiply at a time.
template <class T>
inline constexpr int kWarpKeys = std::is_same_v<T, float> ? 16 : 32;
template <class T>
inline constexpr int kTileKeys = kWarps* kWarpKeys<T>;

// The CTA's shared memory: chunks [depth / kDepth][16 rows] of q, one chunk of the tile's keys, products, candidates,
// and scores.
template <class T>
struct SelectShared {
  static constexpr int kStride = tile_stride<T>(kDepth), kProductStride = kTileKeys<T> + 1;
  T *q, *k;
  float* products;  // [kTokens][kProductStride]
  Candidate* candidates;
  float* scores;
  static int64_t bytes(int64_t depth) {
    return (depth / kDepth * kTokens + kTileKeys<T>)*kStride * static_cast<int64_t>(sizeof(T)) +
           kWarps * kCandidates * static_cast<int64_t>(sizeof(Candidate)) + kTokens * kProductStride * int64_t{4};
  }
  __device__ explicit SelectShared(const SelectIndex<T>& s) {
    q = reinterpret_cast<T*>(dynamic_shared());
    k = q + s.depth / kDepth * kTokens * kStride;
    candidates = reinterpret_cast<Candidate*>(k + kTileKeys<T> * kStride);
    products = reinterpret_cast<float*>(candidates + kWarps * kCandidates);
    scores = s.slab != nullptr ? s.slab + blockIdx.x * s.slab_stride : products + kTokens * kProductStride;
  }
};

// Computes the scores of the candidates of the tokens [first, last] of one document, whose first token is `begin`.
template <class T>
__device__ __forceinline__ void score_blocks(const SelectIndex<T>& s, const SelectShared<T>& shared, int b, int g,
                                             int begin, int first, int last, const SelectionRule<int>& rule) {
  constexpr int kStride = SelectShared<T>::kStride;
  const int warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < rule.candidate_end * kScoreStride; i += kThreads) shared.scores[i] = -INFINITY;
  for (int chunk = 0; chunk < s.depth / kDepth; ++chunk)
    load_rows<kTokens>(shared.q + chunk * kTokens * kStride, kStride, kDepth, s.q.columns(chunk * kDepth, kDepth),
                       [&](int r) { return first + r <= last ? s.q.at(b, first + r, g) + chunk * kDepth : nullptr; });
  const int key_end = rule.candidate_end * s.l_sel;  // counted in the document
  for (int key0 = rule.init_end * s.l_sel; key0 < key_end; key0 += kTileKeys<T>) {
    float c[kWarpKeys<T> / 8][4] = {};
    for (int chunk = 0; chunk < s.depth / kDepth; ++chunk) {
      __syncthreads();  // all warps have multiplied the chunk before
      load_rows<kTileKeys<T>>(shared.k, kStride, kDepth, s.k.columns(chunk * kDepth, kDepth), [&](int r) {
        return key0 + r < key_end ? s.k.at(b, begin + key0 + r, 0) + chunk * kDepth : nullptr;
      });
      copy_async_wait();
      __syncthreads();
      multiply_nt<kWarpKeys<T>>(c, shared.q + chunk * kTokens * kStride, shared.k + warp * kWarpKeys<T> * kStride,
                                kStride, kDepth);
    }
#pragma unroll
    for (int j = 0; j < kWarpKeys<T> / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        shared.products[(fragment_row() + e / 2 * 8) * SelectShared<T>::kProductStride + warp * kWarpKeys<T> + 8 * j +
                        fragment_column() + e % 2] = c[j][e];
    __syncthreads();
    // A thread has one token and every eighth block.
    const float* row = shared.products + threadIdx.x % kTokens * SelectShared<T>::kProductStride;
    const int tile_end = min(key0 + kTileKeys<T>, key_end);
    for (int j = key0 / s.l_sel + static_cast<int>(threadIdx.x) / kTokens; j * s.l_sel < tile_end;
         j += kThreads / kTokens) {
      float& score = shared.scores[j * kScoreStride + threadIdx.x % kTokens];
      float best = score;
      for (int key = max(j * s.l_sel, key0); key < min((j + 1) * s.l_sel, tile_end); ++key)
        best = fmaxf(best, row[key - key0]);
      score = best;
    }
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) select_index_kernel(const __grid_constant__ SelectIndex<T> s) {
  const SelectShared<T> shared(s);
  const int warp = threadIdx.x / 32;
  for (int64_t item = blockIdx.x; item < s.items; item += gridDim.x) {
    const auto bg = static_cast<int>(item % s.sequences_and_groups);
    const int b = bg / s.groups, g = bg % s.groups;
    // The last tokens see the most keys and begin first.
    const auto tile = static_cast<int>(s.items / s.sequences_and_groups - 1 - item / s.sequences_and_groups);
    const int tile_end = min(s.first_token + (tile + 1) * kTokens, s.tokens);
    const DocumentRow<int> row = s.documents.row(b);
    for (int first = s.first_token + tile * kTokens; first < tile_end;) {
      const int begin = row.begin(first), last = min(tile_end, row.end(first)) - 1;
      const SelectionRule<int> rule = s.rule(last - begin);  // its candidates include those of the other tokens
      if (!rule.lists_all()) score_blocks(s, shared, b, g, begin, first, last, rule);
      for (int t = first + warp; t <= last; t += kWarps)
        write_list<SignedOrder>(s.block_index.at(b, t, g), s.n_sel, shared.scores + (t - first), s.rule(t - begin),
                                row.first_block(first), shared.candidates + warp * kCandidates);
      __syncthreads();  // all warps have read the scores before they are overwritten
      first = last + 1;
    }
  }
}

}  // namespace

void select_index_portable(Context& ctx, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions& o,
                           const Documents& documents) {
  const int64_t first = documents.part.first_query, tokens = first + iq.size(1), bgs = iq.size(0) * iq.size(2);
  const auto as_int = [](int64_t count) { return static_cast<int>(std::min(count, kMaxSelectLength)); };
  dispatch_gpu_float(iq.dtype, [&]<class T>() {
    const int64_t depth = align_up(iq.size(3), kDepth), work_bytes = SelectShared<T>::bytes(depth);
    const int64_t score_floats = ceil_div(tokens * o.every, std::min(o.l_sel, tokens * o.every)) * kScoreStride;
    const bool in_shared = work_bytes + 4 * score_floats <= std::min(kSharedLimit, shared_limits(ctx).cta_bytes);
    const int64_t items = ceil_div(iq.size(1), kTokens) * bgs;
    const int64_t ctas = in_shared ? items : std::min<int64_t>(items, 2 * ctx.num_sms);
    Scratch::Scope scope(ctx.scratch);
    const auto from_first = [&](auto view) {
      view.data -= first * view.row;
      return view;
    };
    const SelectIndex<T> s{.q = from_first(make_view<const T>(iq)),
                           .k = make_view<const T>(ik),
                           .block_index = from_first(make_view<int32_t>(block_index)),
                           .first_token = static_cast<int>(first),
                           .tokens = static_cast<int>(tokens),
                           .keys = static_cast<int>(ik.size(1)),
                           .groups = static_cast<int>(iq.size(2)),
                           .depth = static_cast<int>(depth),
                           .l_sel = as_int(o.l_sel),
                           .n_sel = as_int(o.n_sel),
                           .init_blocks = as_int(o.init_blocks),
                           .local_blocks = as_int(o.local_blocks),
                           .every = as_int(o.every),
                           .items = items,
                           .sequences_and_groups = bgs,
                           .slab = in_shared ? nullptr : scope.alloc(DType::f32, {ctas, score_floats}).ptr<float>(),
                           .slab_stride = score_floats,
                           .documents = document_view(documents, tokens)};
    launch(ctx, "nsa_select_index", select_index_kernel<T>, dim3(ctas), dim3(kThreads),
           work_bytes + (in_shared ? 4 * score_floats : 0), s);
  });
}

}  // namespace triad::cuda
