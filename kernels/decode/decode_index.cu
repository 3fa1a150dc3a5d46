// Decoding with a taught index: the new token's lists, and attention with one softmax over the listed blocks. Warps
// score the candidate blocks, one each, then a warp writes the list of each (sequence, group). Attention has 64 listed
// keys a CTA, and the combination of decode/decode.cuh. As there, grids depend on the cache's capacity alone.
#include <algorithm>

#include "kernels/decode/decode_mma.cuh"
#include "kernels/nsa/gpu/select_best.cuh"

namespace triad::cuda {
namespace {

// ---- lists ----

constexpr int kScoreThreads = 256, kScoreWarps = kScoreThreads / 32;
constexpr int kKeyLanes = 8;         // lanes per key
constexpr int kMaxIndexWidth = 256;  // most of nsa.d_index
constexpr int kScoreColumns = 16;    // lists whose scores share rows of kScoreStride

template <class T>
struct IndexDecode {
  Bthd<const T> q, k;
  Bthd<int32_t> lists;
  const int32_t* position;  // [B] the new token's position
  int groups, di, l_sel, n_sel, init_blocks, local_blocks;
  int every;      // tokens that share a list
  int blocks;     // candidates at most
  float scale;    // 1 / sqrt(di)
  float* scores;  // [ceil(B * Hkv / kScoreColumns), blocks, kScoreStride]

  __device__ SelectionRule<int> rule(int b) const { return {position[b], l_sel, n_sel, init_blocks, local_blocks}; }
  // Whether the new token selects; else it shares the last step's list.
  __device__ bool selects(int b) const { return position[b] % every == 0; }
  // Scores of the list of sequence b and group g, spaced by kScoreStride.
  __device__ float* list_scores(int b, int g) const {
    const int list = b * groups + g;
    return scores + int64_t{list / kScoreColumns} * blocks * kScoreStride + list % kScoreColumns;
  }
};

// Candidates are complete blocks, so all their tokens are visible.
template <class T>
__global__ void __launch_bounds__(kScoreThreads) index_scores_kernel(IndexDecode<T> a) {
  pdl_wait();
  __shared__ float q[kMaxIndexWidth];
  const int g = blockIdx.y, b = blockIdx.z, lane = threadIdx.x % 32;
  const SelectionRule<int> rule = a.rule(b);
  const int first = rule.init_end + static_cast<int>(blockIdx.x) * kScoreWarps, j = first + threadIdx.x / 32;
  if (!a.selects(b) || rule.lists_all() || first >= rule.candidate_end) return;
  const T* const row = a.q.row(b, 0, g);
  for (int i = threadIdx.x; i < a.di; i += kScoreThreads) q[i] = to_float(row[i]) * a.scale;
  __syncthreads();
  if (j >= rule.candidate_end) return;
  float best = -INFINITY;
#pragma unroll 4
  for (int i = lane / kKeyLanes; i - lane / kKeyLanes < a.l_sel; i += 32 / kKeyLanes) {
    const T* const key = a.k.row(b, j * a.l_sel + min(i, a.l_sel - 1), 0);  // a block's last token may come again
    float s = 0;
    for (int d = lane % kKeyLanes; d < a.di; d += kKeyLanes) s = fmaf(q[d], to_float(key[d]), s);
    best = fmaxf(best, warp_sum<kKeyLanes>(s));
  }
  best = warp_max(best);
  if (lane == 0) a.list_scores(b, g)[j * kScoreStride] = best;
}

template <class T>
__global__ void __launch_bounds__(32) index_lists_kernel(IndexDecode<T> a) {
  pdl_wait();
  __shared__ Candidate collected[kCandidates];
  const int g = blockIdx.x, b = blockIdx.y;
  if (!a.selects(b)) return;
  write_list<SignedOrder>(a.lists.row(b, 0, g), a.n_sel, a.list_scores(b, g), a.rule(b), 0, collected);
}

template <class T>
void write_lists(Context& ctx, const Tensor& lists, const ConstTensor& iq, const ConstTensor& ik,
                 const ConstTensor& position, const SelectOptions& o) {
  const auto as_int = [](int64_t x) { return static_cast<int>(std::min<int64_t>(x, 1 << 30)); };
  const int64_t B = iq.size(0), groups = iq.size(2), blocks = ik.size(1) / o.l_sel;
  TRIAD_CHECK(iq.size(3) <= kMaxIndexWidth, "index_decode: rows of {}, at most {} on a GPU", iq.size(3),
              kMaxIndexWidth);
  Scratch::Scope scope(ctx.scratch);
  const int64_t rows = ceil_div(B * groups, kScoreColumns) * std::max<int64_t>(blocks, 1);
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
                         .scores = alloc_floats(scope, rows * kScoreStride, "index scores")};
  const unsigned ctas = static_cast<unsigned>(ceil_div(blocks, kScoreWarps)), g = static_cast<unsigned>(groups),
                 b = static_cast<unsigned>(B);
  if (ctas > 0)
    launch_pdl(ctx, "index_decode scores", index_scores_kernel<T>, dim3(ctas, g, b), dim3(kScoreThreads), 0, a);
  launch_pdl(ctx, "index_decode", index_lists_kernel<T>, dim3(g, b), dim3(32), 0, a);
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
