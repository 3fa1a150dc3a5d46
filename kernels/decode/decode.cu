// Attention for one new token per sequence. The work is to read a few thousand keys, so it is split over CTAs by key
// chunks for one (sequence, group), and the chunks' partial softmaxes are combined at the end (split-KV). At 64k
// tokens, each group has 64 chunks of compressed keys, 8 of selected and 8 of window keys. There are two dependent
// kernels:
//   1. this file: the compressed branch's chunks, which store their scores for the selection, the window branch's
//      chunks, and the gate.
//   2. decode/decode_selected.cu: the selection, the selected branch's chunks, and the combination of all branches,
//      rounded as in the forward pass and summed by their gates.
// In bf16 with heads of 64 or 128, on Hopper or with more than kFewSequences, one kernel does all of it without chunks
// in memory: decode/decode_many.cu. Dense attention has one branch's chunks and the combination only
// (decode/decode_dense.cu). Grid and scratch sizes depend only on the cache's
// capacity, and positions are read on the device, so one recorded CUDA graph serves all positions; chunks beyond a
// position exit at once. Softmaxes use powers of 2. An NSA step is bound by latency: each kernel waits for memory about
// three times in sequence.
#include <algorithm>

#include "kernels/common/launch_pdl.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/decode/decode_gate.cuh"

namespace triad::cuda {
namespace {

constexpr int kMaxTile = 448;  // most blocks per tile

// ---- kernel 1. blockIdx.x: the compressed branch's chunks, then the window branch's, then the gate ----

template <class T, int V, int kHeads, bool kHoldsFc1>
__global__ void __launch_bounds__(kBranchThreads, 2)
    decode_branches_kernel(Decode<T> a, GateMlp<T> mlp, GateKernelOptions gate_options) {
  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  const bool gates = static_cast<int>(blockIdx.x) == a.chunks[0] + a.chunks[2];
  const GateMemory<T, kHoldsFc1> gate_memory(shared, mlp);
  if (gates && gate_options.computed())
    load_gate_weights<kBranchThreads>(
        mlp, gate_memory);  // runs before pdl_wait(), since the previous kernel does not write weights
  pdl_wait();
  const int g = blockIdx.y, b = blockIdx.z;
  if (gates) return gate_of<kBranchThreads>(a, mlp, gate_options, gate_memory, b, g);
  int chunk = blockIdx.x;
  const int branch = chunk < a.chunks[0] ? 0 : 2, at = a.position[b];
  if (branch == 2) chunk -= a.chunks[0];
  const int first = chunk * kBranchChunk, count = min(kBranchChunk, a.keys(branch, at) - first);
  if (count <= 0 || !a.run[branch]) return;
  const BranchChunk<kHeads> memory(shared, a.G, a.dk);
  float* const scores = branch == 0 ? a.scores + (int64_t{b} * a.Hq + g * a.G) * a.rows[0] + first : nullptr;
  attend_chunk<true, V>(
      a, memory, branch, chunk, b, g, count, [&](int i) { return first + i; }, scores, a.rows[0]);
}

template <class T, int V, int kHeads, bool kHoldsFc1 = true>
void launch_branches(Context& ctx, const Decode<T>& a, const GateMlp<T>& mlp, const GateKernelOptions& gate) {
  const int floats =
      std::max(BranchChunk<kHeads>::floats(a.G, a.dk), gate.computed() ? GateMemory<T, kHoldsFc1>::floats(mlp) : 0);
  const dim3 grid(static_cast<unsigned>(a.chunks[0] + a.chunks[2] + 1), static_cast<unsigned>(a.Hkv),
                  static_cast<unsigned>(a.B));
  launch_pdl(ctx, "nsa_decode branches", decode_branches_kernel<T, V, kHeads, kHoldsFc1>, grid, dim3(kBranchThreads),
             sizeof(float) * static_cast<size_t>(floats), a, mlp, gate);
}

// vectors: whether all key and value rows consist of aligned 16-byte vectors.
template <class T>
void launch_branches(Context& ctx, const Decode<T>& a, bool vectors, const GateMlp<T>& mlp,
                     const GateKernelOptions& gate) {
  const int64_t gate_bytes = gate.computed() ? GateMemory<T, true>::floats(mlp) * int64_t{sizeof(float)} : 0;
  if (gate_bytes > shared_limits(ctx).cta_bytes)
    launch_branches<T, 1, 2, false>(ctx, a, mlp, gate);
  else if (!vectors)
    launch_branches<T, 1, 2>(ctx, a, mlp, gate);
  else if (a.G <= 2)
    launch_branches<T, kVector<T>, 2>(ctx, a, mlp, gate);
  else
    launch_branches<T, kVector<T>, 8>(ctx, a, mlp, gate);
}

template <class T>
void decode(Context& ctx, const Tensor& out, const DecodeIn& in, const GateWeights& gate, const NsaConfig& c,
            const DecodeProbe& probe) {
  const NsaCache& cache = in.cache;
  const int64_t S = cache.k_sel.size(1);
  auto a = decode_args<Decode<T>>(out, in.q, in.position, cache.k_win, cache.v_win);
  bool vectors = set_branch(a, 0, cache.k_cmp, cache.v_cmp, cache.k_cmp.size(1), probe.run[0]);
  vectors &= set_branch(a, 1, cache.k_sel, cache.v_sel, std::min(c.n_sel * c.l_sel, S + c.l_sel), probe.run[1]);
  vectors &= set_branch(a, 2, cache.k_win, cache.v_win, cache.k_win.size(1), probe.run[2]);
  if (!probe.reads.empty()) a.reads = reinterpret_cast<unsigned long long*>(probe.reads.ptr<int64_t>());
  if (!in.lists.empty()) a.lists = in.lists.ptr<int32_t>();
  if (!in.shared_lists.empty()) a.shared_lists = in.shared_lists.ptr<int32_t>();
  a.every = static_cast<int>(c.every);
  a.l = static_cast<int>(c.l), a.d = static_cast<int>(c.d), a.l_sel = static_cast<int>(c.l_sel);
  a.n_sel = static_cast<int>(c.n_sel), a.init_blocks = static_cast<int>(c.init_blocks);
  a.local_blocks = static_cast<int>(c.local_blocks);
  const int64_t most_of_share = std::max<int64_t>(1, ceil_div(ceil_div(a.rows[1], a.l_sel), kClusterCtas));
  a.tile_blocks = tile_blocks(a.l_sel, a.d, std::min<int64_t>(kMaxTile, most_of_share));
  TRIAD_CHECK(c.n_sel <= kMaxSelected, "nsa_decode: lists of {} blocks, at most {} on a GPU", c.n_sel, kMaxSelected);

  Scratch::Scope scope(ctx.scratch);
  const int64_t groups = int64_t{a.B} * a.Hkv;
  a.scores = alloc_floats(scope, int64_t{a.B} * a.Hq * a.rows[0], "scores");
  alloc_partials(scope, a);
  a.gate = alloc_floats(scope, 3 * groups, "gate");
  a.best = reinterpret_cast<uint64_t*>(
      alloc_floats(scope, groups * kWideClusterCtas * a.n_sel * 2, "best blocks of shares"));
  const GateMlp<T> mlp = gate_mlp<T>(gate);
  const GateKernelOptions options = {static_cast<int>(c.gate.force), c.gate.uniform, c.gate.kind == GateKind::softmax,
                                     static_cast<float>(1.0 / c.gate.temperature)};
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    if (launch_many(ctx, a, vectors && has_vectors(in.q, kVector<T>), mlp, options)) return;
  launch_branches(ctx, a, vectors, mlp, options);
  launch_selected(ctx, a, vectors);
}

}  // namespace

void nsa_decode(Context& ctx, Tensor out, const DecodeIn& in, const GateWeights& gate, const NsaConfig& c,
                const DecodeProbe& probe) {
  dispatch_gpu_float(out.dtype, [&]<class T>() { decode<T>(ctx, out, in, gate, c, probe); });
}

}  // namespace triad::cuda
