// Decoding with a taught index: the new token's lists, and attention with one softmax over the listed blocks. Warps
// score the candidate blocks, one each, for several groups at once, since all groups have the same keys. A CTA writes
// the list of each (sequence, group). Of many candidates each of its warps chooses the best of a share, and the first
// warp those of all shares. Attention has 64 listed keys a CTA, and the combination of decode/decode.cuh. As there,
// grids depend on the cache's capacity alone.
#include <algorithm>

#include "kernels/decode/decode_mma.cuh"
#include "kernels/nsa/gpu/select_best.cuh"

namespace triad::cuda {
namespace {

// ---- lists ----

constexpr int kScoreThreads = 256, kScoreWarps = kScoreThreads / 32;
constexpr int kScoreBatch = 8;   // keys that a lane loads before it uses the first
constexpr int kListWarps = 32;   // warps that choose the blocks of a list
constexpr int kLeastShare = 64;  // candidates that one warp chooses from alone
constexpr int kMostSharedSlots = 64;

template <class T>
struct IndexDecode {
  Bthd<const T> q, k;
  Bthd<int32_t> lists;
  const int32_t* position;  // [B] the new token's position
  int groups, di, l_sel, n_sel, init_blocks, local_blocks;
  int every;      // tokens that share a list
  int blocks;     // candidates at most
  float scale;    // 1 / sqrt(di)
  float* scores;  // [B, Hkv, blocks]

  __device__ SelectionRule<int> rule(int b) const { return {position[b], l_sel, n_sel, init_blocks, local_blocks}; }
  // Whether the new token selects; else it shares the last step's list.
  __device__ bool selects(int b) const { return position[b] % every == 0; }
  __device__ float* list_scores(int b, int g) const { return scores + (int64_t{b} * groups + g) * blocks; }
};

// Candidates are complete blocks, so all their tokens are visible. A warp scores block j for the groups g0, g0 + 1, ...
// kLanes lanes share a key, with kLanes * kWidth elements; 0: any width, and keys without whole vectors.
template <class T, int kGroups, int kLanes>
__global__ void __launch_bounds__(kScoreThreads) index_scores_kernel(IndexDecode<T> a) {
  constexpr int kWidth = kLanes > 0 ? kVector<T> : 1, kKeyLanes = kLanes > 0 ? kLanes : 8, kKeys = 32 / kKeyLanes;
  pdl_wait();
  const int g0 = static_cast<int>(blockIdx.y) * kGroups, b = blockIdx.z, lane = threadIdx.x % 32;
  const SelectionRule<int> rule = a.rule(b);
  const int j = rule.init_end + static_cast<int>(blockIdx.x) * kScoreWarps + static_cast<int>(threadIdx.x) / 32;
  if (!a.selects(b) || rule.lists_all() || j >= rule.candidate_end) return;
  const int element = lane % kKeyLanes * kWidth;
  const auto key_of = [&](int i) {  // a block's last token may come again
    return a.k.row(b, j * a.l_sel + min(i + lane / kKeyLanes, a.l_sel - 1), 0) + element;
  };
  const T* queries[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) queries[g] = a.q.row(b, 0, min(g0 + g, a.groups - 1)) + element;
  float best[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) best[g] = -INFINITY;
  const auto see = [&](float(&sum)[kGroups]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) best[g] = fmaxf(best[g], warp_sum<kKeyLanes>(sum[g]) * a.scale);
  };
  if constexpr (kLanes > 0) {
    float q[kGroups][kWidth];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) load_vector<kWidth>(q[g], queries[g]);
#pragma unroll 1
    for (int i0 = 0; i0 < a.l_sel; i0 += kKeys * kScoreBatch) {
      uint4 keys[kScoreBatch];
#pragma unroll
      for (int u = 0; u < kScoreBatch; ++u) keys[u] = *reinterpret_cast<const uint4*>(key_of(i0 + u * kKeys));
#pragma unroll
      for (int u = 0; u < kScoreBatch; ++u) {
        float k[kWidth], sum[kGroups] = {};
        as_floats<T>(k, keys[u]);
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
          for (int e = 0; e < kWidth; ++e) sum[g] = fmaf(q[g][e], k[e], sum[g]);
        see(sum);
      }
    }
  } else {
#pragma unroll 4
    for (int i = 0; i < a.l_sel; i += kKeys) {
      const T* const key = key_of(i);
      float sum[kGroups] = {};
      for (int d = 0; d + element < a.di; d += kKeyLanes)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) sum[g] = fmaf(to_float(queries[g][d]), to_float(key[d]), sum[g]);
      see(sum);
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    best[g] = warp_max(best[g]);
    if (lane == 0 && g0 + g < a.groups) a.list_scores(b, g0 + g)[j] = best[g];
  }
}

// What a list's warps share: the best blocks of each warp's share, in ascending order, and their scores; the places of
// the best among these.
template <int kWarps>
struct SharedBest {
  int32_t blocks[kWarps * kMostSharedSlots], chosen[kMostSharedSlots];
  float scores[kWarps * kMostSharedSlots];
};

// The list of sequence blockIdx.y and group blockIdx.x.
template <class T, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) index_lists_kernel(IndexDecode<T> a) {
  pdl_wait();
  __shared__ Candidate collected[kWarps][kCandidates];
  const int g = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (!a.selects(b)) return;
  const SelectionRule<int> rule = a.rule(b);
  const float* const scores = a.list_scores(b, g);
  int32_t* const list = a.lists.row(b, 0, g);
  if constexpr (kWarps > 1) {
    __shared__ SharedBest<kWarps> best;
    if (!rule.lists_all() && rule.slots > 0 && rule.slots <= kMostSharedSlots && rule.candidates() > kLeastShare) {
      const int share = max(kLeastShare, ceil_div(rule.candidates(), kWarps));
      int place = 0, all = 0;  // where the warp's best begin, how many all warps have
#pragma unroll 1
      for (int w = 0; w < kWarps; ++w) {
        if (w == warp) place = all;
        all += max(0, min(rule.slots, min(share, rule.candidates() - w * share)));
      }
      SelectionRule<int> own = rule;
      own.init_end += warp * share;
      own.candidate_end = min(rule.candidate_end, own.init_end + share);
      const int count = max(0, min(rule.slots, own.candidates()));
      if (own.lists_all()) {
        for (int i = lane; i < count; i += 32) best.blocks[place + i] = own.init_end + i;
      } else {
        write_slots<SignedOrder, 1>(best.blocks + place, scores, own, 0, collected[warp]);
      }
      __syncwarp();
      for (int i = lane; i < count; i += 32) best.scores[place + i] = scores[best.blocks[place + i]];
      __syncthreads();
      if (warp > 0) return;
      SelectionRule<int> merged = rule;  // among places in `best` instead of blocks
      merged.init_end = 0, merged.candidate_end = all;
      write_list_by(list, a.n_sel, rule, 0, [&](int32_t* to) {
        write_slots<SignedOrder, 1>(best.chosen, best.scores, merged, 0, collected[0]);
        __syncwarp();
        for (int i = lane; i < rule.slots; i += 32) to[i] = best.blocks[best.chosen[i]];
      });
      return;
    }
  }
  if (warp == 0) write_list<SignedOrder, 1>(list, a.n_sel, scores, rule, 0, collected[0]);
}

template <class T, int kGroups>
void launch_scores(Context& ctx, const IndexDecode<T>& a, int64_t B, bool vectors) {
  const dim3 grid(static_cast<unsigned>(ceil_div(a.blocks, kScoreWarps)),
                  static_cast<unsigned>(ceil_div(a.groups, kGroups)), static_cast<unsigned>(B));
  const auto run = [&](auto* kernel) {
    launch_pdl(ctx, "index_decode scores", kernel, grid, dim3(kScoreThreads), 0, a);
  };
  const int lanes = vectors ? a.di / kVector<T> : 0;
  if (lanes == 4) return run(index_scores_kernel<T, kGroups, 4>);
  if (lanes == 8) return run(index_scores_kernel<T, kGroups, 8>);
  if (lanes == 16) return run(index_scores_kernel<T, kGroups, 16>);
  run(index_scores_kernel<T, kGroups, 0>);
}

template <class T>
void write_lists(Context& ctx, const Tensor& lists, const ConstTensor& iq, const ConstTensor& ik,
                 const ConstTensor& position, const SelectOptions& o) {
  const auto as_int = [](int64_t x) { return static_cast<int>(std::min<int64_t>(x, 1 << 30)); };
  const int64_t B = iq.size(0), groups = iq.size(2), blocks = ik.size(1) / o.l_sel;
  Scratch::Scope scope(ctx.scratch);
  const IndexDecode<T> a{.q = bthd<T>(iq),
                         .k = bthd<T>(ik),
                         .lists = bthd<int32_t>(lists),
                         .position = position.ptr<int32_t>(),
                         .groups = as_int(groups),
                         .di = as_int(iq.size(3)),
                         .l_sel = as_int(o.l_sel),
                         .n_sel = as_int(o.n_sel),
                         .init_blocks = as_int(o.init_blocks),
                         .local_blocks = as_int(o.local_blocks),
                         .every = as_int(o.every),
                         .blocks = as_int(blocks),
                         .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(iq.size(3)))),
                         .scores = alloc_floats(scope, B * groups * std::max<int64_t>(blocks, 1), "index scores")};
  const bool vectors = has_vectors(iq, kVector<T>) && has_vectors(ik, kVector<T>);
  if (blocks > 0) groups == 1 ? launch_scores<T, 1>(ctx, a, B, vectors) : launch_scores<T, 2>(ctx, a, B, vectors);
  const dim3 grid(static_cast<unsigned>(groups), static_cast<unsigned>(B));
  const bool shared = blocks > 4 * kLeastShare;  // fewer are chosen from sooner than warps meet
  launch_pdl(ctx, "index_decode", shared ? index_lists_kernel<T, kListWarps> : index_lists_kernel<T, 1>, grid,
             dim3(32 * (shared ? kListWarps : 1)), 0, a);
}

// ---- attention ----

template <class T>
struct SelectedDecode : DecodeArgs<T, 1> {
  const int32_t* lists;  // [B,Hkv,n_sel]
  int l_sel, n_sel;
  int chunk_keys;  // keys per CTA

  __host__ __device__ int chunk_of(int) const { return chunk_keys; }
  __device__ int keys(int, int at) const { return (min(n_sel, at / l_sel + 1) - 1) * l_sel + at % l_sel + 1; }
  __device__ int64_t partial(int b, int g, int, int chunk) const {
    return ((int64_t{b} * this->Hkv + g) * this->chunks[0] + chunk) * this->G;
  }
  __device__ float add_branch(float, float o, int, int, int) const { return o; }
};

// The listed blocks' tokens are numbered as consecutive keys; only the last block may be incomplete.
template <class T, int V, int kHeads>
__global__ void __launch_bounds__(kBranchThreads, 2) selected_decode_kernel(SelectedDecode<T> a) {
  pdl_wait();
  const int chunk = blockIdx.x, g = blockIdx.y, b = blockIdx.z;
  const int first = chunk * kBranchChunk, count = min(kBranchChunk, a.keys(0, a.position[b]) - first);
  if (count <= 0 || !a.run[0]) return;
  const BranchChunk<kHeads> memory(reinterpret_cast<float*>(dynamic_shared()), a.G, a.dk);
  const int32_t* const list = a.lists + (int64_t{b} * a.Hkv + g) * a.n_sel;
  const auto row_of = [&](int i) { return list[(first + i) / a.l_sel] * a.l_sel + (first + i) % a.l_sel; };
  attend_chunk<true, V>(a, memory, 0, chunk, b, g, count, row_of, nullptr, 0);
}

template <int kDk, int kDv>
__global__ void __launch_bounds__(kSpanThreads, kDk + kDv <= 128 ? 2 : 1)
    selected_decode_spans_kernel(SelectedDecode<__nv_bfloat16> a) {
  pdl_wait();
  const int g = blockIdx.y, b = blockIdx.z, first = static_cast<int>(blockIdx.x) * a.chunk_keys;
  const int count = min(a.chunk_keys, a.keys(0, a.position[b]) - first);
  if (count <= 0 || !a.run[0]) return;
  const ListedRows rows{a.lists + (int64_t{b} * a.Hkv + g) * a.n_sel, a.l_sel};
  attend_span<kDk, kDv>(a, count, [&](int tile, int i) { return rows(first + tile, first + i); });
}

// For many sequences: launches selected_decode_spans_kernel. Returns false and does nothing if it does not support the
// shape.
bool launch_on_tensor_cores(Context& ctx, SelectedDecode<__nv_bfloat16>& a, bool vectors, int most) {
  if (a.B <= kFewSequences || a.l_sel < kTileKeys || !has_spans(a, vectors)) return false;
  set_spans(a, most, kManySpans);
  a.dk == 64 ? launch_spans<64>(ctx, "selected_decode", selected_decode_spans_kernel<64, 64>, a)
             : launch_spans<128>(ctx, "selected_decode", selected_decode_spans_kernel<128, 128>, a);
  return true;
}

template <class T, int V, int kHeads>
void launch_chunks(Context& ctx, const SelectedDecode<T>& a) {
  const dim3 grid(static_cast<unsigned>(a.chunks[0]), static_cast<unsigned>(a.Hkv), static_cast<unsigned>(a.B));
  launch_pdl(ctx, "selected_decode chunks", selected_decode_kernel<T, V, kHeads>, grid, dim3(kBranchThreads),
             sizeof(float) * static_cast<size_t>(BranchChunk<kHeads>::floats(a.G, a.dk)), a);
}

template <class T>
void attend(Context& ctx, const Tensor& out, const DenseDecodeIn& in, const ConstTensor& lists, int64_t l_sel,
            const DecodeProbe& probe) {
  constexpr size_t kSel = static_cast<size_t>(Branch::sel);
  TRIAD_CHECK(lists.contiguous(), "selected_decode: lists {} have gaps", lists.str());
  auto a = decode_args<SelectedDecode<T>>(out, in.q, in.position, in.cache.k, in.cache.v);
  a.lists = lists.ptr<int32_t>();
  const int64_t n = lists.size(3), S = in.cache.k.size(1);
  a.l_sel = static_cast<int>(l_sel), a.n_sel = static_cast<int>(n);
  if (!probe.reads.empty()) a.reads = reinterpret_cast<unsigned long long*>(probe.reads.ptr<int64_t>()) + kSel;
  const int most = static_cast<int>(std::min(n * l_sel, S + l_sel));
  a.chunk_keys = kBranchChunk;
  const bool vectors = set_branch(a, 0, in.cache.k, in.cache.v, most, probe.run[kSel]);
  Scratch::Scope scope(ctx.scratch);
  alloc_partials(scope, a);  // enough for spans too, since they are longer and fewer than chunks of kBranchChunk
  const bool launched = [&] {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
      return launch_on_tensor_cores(ctx, a, vectors && has_vectors(in.q, kVector<T>), most);
    return false;
  }();
  if (!launched) dispatch_chunks<T>(a.G, vectors, [&]<int V, int kHeads>() { launch_chunks<T, V, kHeads>(ctx, a); });
  launch_combine(ctx, "selected_decode combine", a);
}

}  // namespace

void index_decode(Context& ctx, Tensor lists, ConstTensor iq, ConstTensor ik, ConstTensor position,
                  const SelectOptions& o) {
  dispatch_gpu_float(iq.dtype, [&]<class T>() { write_lists<T>(ctx, lists, iq, ik, position, o); });
}

void selected_decode(Context& ctx, Tensor out, const DenseDecodeIn& in, ConstTensor lists, int64_t l_sel,
                     const DecodeProbe& probe) {
  dispatch_gpu_float(out.dtype, [&]<class T>() { attend<T>(ctx, out, in, lists, l_sel, probe); });
}

}  // namespace triad::cuda
