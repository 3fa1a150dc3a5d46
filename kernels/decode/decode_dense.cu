// Dense attention for one new token, over all keys in the cache. There are two chunk kernels, both followed by the
// combination (decode/decode.cuh). dense_decode_chunks_kernel takes any shape, as NSA's branches do (attend_chunk).
// dense_decode_kernel takes bf16 and heads of 64 or 128, on tensor cores. It is bound by memory. Its chunks, here
// called spans, are longer, since combining many short ones would take longer than reading them. A CTA processes one
// span, each warp every eighth of its tiles (decode/decode_mma.cuh). At the span's end the CTA combines its warps' sums
// and writes a chunk's partial sums (decode/decode.cuh).
#include <algorithm>

#include "kernels/common/launch_pdl.cuh"
#include "kernels/decode/decode_mma.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;
constexpr int kMaxSpans = 128;  // most spans per (sequence, group): with two groups, two CTAs per SM

template <int kDk, int kDv>
__global__ void __launch_bounds__(kSpanThreads, kDk + kDv <= 128 ? 2 : 1) dense_decode_kernel(DenseDecode<bf16> a) {
  pdl_wait();
  const int first = static_cast<int>(blockIdx.x) * a.chunk_keys;
  const int count = min(a.chunk_keys, a.keys(0, a.position[blockIdx.z]) - first);
  if (count > 0 && a.run[0]) attend_span<kDk, kDv>(a, count, [&](int, int i) { return first + i; });
}

// Launches dense_decode_kernel, with spans as chunks. Returns false and does nothing if it does not support the shape.
bool launch_on_tensor_cores(Context& ctx, DenseDecode<bf16>& a, bool vectors) {
  if (!has_spans(a, vectors)) return false;
  set_spans(a, a.rows[0], a.B <= kFewSequences ? kMaxSpans : kManySpans);
  a.dk == 64 ? launch_spans<64>(ctx, "dense_decode", dense_decode_kernel<64, 64>, a)
             : launch_spans<128>(ctx, "dense_decode", dense_decode_kernel<128, 128>, a);
  return true;
}

// ---- any shape ----

template <class T, int V, int kHeads>
__global__ void __launch_bounds__(kBranchThreads, 2) dense_decode_chunks_kernel(DenseDecode<T> a) {
  pdl_wait();
  const int chunk = blockIdx.x, g = blockIdx.y, b = blockIdx.z;
  const int first = chunk * kBranchChunk, count = min(kBranchChunk, a.keys(0, a.position[b]) - first);
  if (count <= 0 || !a.run[0]) return;
  const BranchChunk<kHeads> memory(reinterpret_cast<float*>(dynamic_shared()), a.G, a.dk);
  attend_chunk<true, V>(
      a, memory, 0, chunk, b, g, count, [&](int i) { return first + i; }, nullptr, 0);
}

template <class T, int V, int kHeads>
void launch_chunks(Context& ctx, const DenseDecode<T>& a) {
  const dim3 grid(static_cast<unsigned>(a.chunks[0]), static_cast<unsigned>(a.Hkv), static_cast<unsigned>(a.B));
  launch_pdl(ctx, "dense_decode chunks", dense_decode_chunks_kernel<T, V, kHeads>, grid, dim3(kBranchThreads),
             sizeof(float) * static_cast<size_t>(BranchChunk<kHeads>::floats(a.G, a.dk)), a);
}

template <class T>
void decode(Context& ctx, const Tensor& out, const DenseDecodeIn& in, const DecodeProbe& probe) {
  constexpr size_t kWin = 2;  // the probe counts dense attention as the window branch
  auto a = decode_args<DenseDecode<T>>(out, in.q, in.position, in.cache.k, in.cache.v);
  a.chunk_keys = kBranchChunk;
  if (!probe.reads.empty()) a.reads = reinterpret_cast<unsigned long long*>(probe.reads.ptr<int64_t>()) + kWin;
  const bool vectors = set_branch(a, 0, in.cache.k, in.cache.v, in.cache.k.size(1), probe.run[kWin]);
  Scratch::Scope scope(ctx.scratch);
  alloc_partials(scope, a);  // enough for spans too, since they are longer and fewer than chunks of kBranchChunk
  const bool launched = [&] {
    if constexpr (std::is_same_v<T, bf16>)
      return launch_on_tensor_cores(ctx, a, vectors && has_vectors(in.q, kVector<T>));
    return false;
  }();
  if (!launched) dispatch_chunks<T>(a.G, vectors, [&]<int V, int kHeads>() { launch_chunks<T, V, kHeads>(ctx, a); });
  launch_combine(ctx, "dense_decode combine", a);
}

}  // namespace

void dense_decode(Context& ctx, Tensor out, const DenseDecodeIn& in, const DecodeProbe& probe) {
  dispatch_gpu_float(out.dtype, [&]<class T>() { decode<T>(ctx, out, in, probe); });
}

}  // namespace triad::cuda
