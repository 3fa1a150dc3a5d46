// Attention for one new token per sequence. The work is to read a few thousand keys, so it is split over CTAs by key
// chunks for one (sequence, group), and the chunks' partial softmaxes are combined at the end (split-KV). At 64k
// tokens, each group has 64 chunks of compressed keys, 8 of selected and 8 of window keys. There are two dependent
// kernels:
//   1. this file: the compressed branch's chunks, which store their scores for the selection, the window branch's
//      chunks, and the gate.
//   2. decode/decode_selected.cu: the selection, the selected branch's chunks, and the combination of all branches,
//      rounded as in the forward pass and summed by their gates.
// Dense attention has one branch's chunks and the combination only (decode/decode_dense.cu).
// Grid and scratch sizes depend only on the cache's capacity, and positions are read on the device, so one recorded
// CUDA graph serves all positions; chunks beyond a position exit at once. Softmaxes use powers of 2. An NSA step is
// bound by latency: each kernel waits for memory about three times in sequence.
#include <algorithm>

#include "kernels/common/launch_pdl.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/decode/decode.cuh"
#include "kernels/nsa/gpu/gate.cuh"

namespace triad::cuda {
namespace {

// About how many compressed keys a CTA scores at a time (a tile) for the selection.
constexpr int kScoreTile = 4096;
constexpr int kMaxTile = 448;  // most blocks per tile

// ---- the gate: one forced branch, uniform, or an MLP on the group's mean query ----

// force: index of the branch whose gate is 1, the others' being 0; -1: none is forced.
struct GateKernelOptions {
  int force = 0;
  bool uniform = false, softmax = false;
  float inverse_temperature = 1;
  __host__ __device__ bool computed() const { return force < 0 && !uniform; }
};

// The gate's shared memory: the MLP's weights, the mean query and the hidden layer. Without kHoldsFc1, for cards on
// which fc1's matrix does not fit, it stays in global memory.
template <class T, bool kHoldsFc1>
struct GateMemory {
  float *fc1_w, *fc1_b, *fc2_w, *fc2_b, *mean, *hidden;
  __host__ __device__ static int weight_floats(const GateMlp<T>& mlp) {
    return kHoldsFc1 ? mlp.weight_floats() : mlp.weight_floats_without_fc1();
  }
  __host__ __device__ static int floats(const GateMlp<T>& mlp) {
    return weight_floats(mlp) + mlp.padded_width() + mlp.padded_hidden();
  }
  __device__ GateMemory(float* memory, const GateMlp<T>& mlp)
      : fc1_w(memory),
        fc1_b(fc1_w + (kHoldsFc1 ? mlp.hidden * mlp.fc1_row() : 0)),
        fc2_w(fc1_b + mlp.hidden),
        fc2_b(fc2_w + 3 * mlp.hidden),
        mean(memory + weight_floats(mlp)),
        hidden(mean + mlp.padded_width()) {}
};
template <class T, bool kHoldsFc1>
__device__ void load_gate_weights(const GateMlp<T>& mlp, const GateMemory<T, kHoldsFc1>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
  for (int row = warp; kHoldsFc1 && row < mlp.hidden; row += kBranchThreads / 32)
#pragma unroll 2
    for (int j = lane; j < mlp.width; j += 32)
      memory.fc1_w[row * mlp.fc1_row() + j] = to_float(mlp.fc1_w[row * mlp.fc1_stride + j]);
#pragma unroll 1
  for (int i = threadIdx.x; i < mlp.hidden; i += kBranchThreads) {
    memory.fc1_b[i] = to_float(mlp.fc1_b[i]);
#pragma unroll
    for (int k = 0; k < 3; ++k) memory.fc2_w[k * mlp.hidden + i] = to_float(mlp.fc2_w[k * mlp.fc2_stride + i]);
  }
  if (threadIdx.x < 3) memory.fc2_b[threadIdx.x] = to_float(mlp.fc2_b[threadIdx.x]);
}
template <class T, bool kHoldsFc1>
__device__ void gate_of(const Decode<T>& a, const GateMlp<T>& mlp, const GateKernelOptions& o,
                        const GateMemory<T, kHoldsFc1>& memory, int b, int g) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (o.computed()) {
    const T* const q = a.q.row(b, 0, int64_t{g} * a.G);
#pragma unroll 1
    for (int j = threadIdx.x; j < mlp.width; j += kBranchThreads) {
      float sum = 0;
#pragma unroll 4
      for (int h = 0; h < a.G; ++h) sum += to_float(q[h * a.q.stride_h + j]);
      memory.mean[j] = sum / static_cast<float>(a.G);
    }
    __syncthreads();
    constexpr int kLanes = 8;  // lanes per hidden unit
#pragma unroll 1
    for (int j0 = 0; j0 < mlp.hidden; j0 += kBranchThreads / kLanes) {
      const int j = j0 + static_cast<int>(threadIdx.x) / kLanes;
      float sum = 0;
      if (j < mlp.hidden)
#pragma unroll 4
        for (int i = threadIdx.x % kLanes; i < mlp.width; i += kLanes)
          sum =
              fmaf(memory.mean[i],
                   kHoldsFc1 ? memory.fc1_w[j * mlp.fc1_row() + i] : to_float(mlp.fc1_w[j * mlp.fc1_stride + i]), sum);
      sum = warp_sum<kLanes>(sum);
      if (j < mlp.hidden && threadIdx.x % kLanes == 0) {
        const float pre = sum + memory.fc1_b[j];
        memory.hidden[j] = pre * sigmoid(pre);
      }
    }
    __syncthreads();
  }
  if (warp > 0) return;
  float z[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    z[k] = k == o.force ? 1.0f : o.uniform && o.force < 0 ? 1.0f / 3.0f : 0.0f;
    if (!o.computed()) continue;
    float sum = 0;
#pragma unroll 1
    for (int j = lane; j < mlp.hidden; j += 32) sum = fmaf(memory.hidden[j], memory.fc2_w[k * mlp.hidden + j], sum);
    z[k] = (warp_sum(sum) + memory.fc2_b[k]) * o.inverse_temperature;
  }
  if (o.computed() && o.softmax) {
    const float max = fmaxf(z[0], fmaxf(z[1], z[2]));
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 3; ++k) sum += z[k] = expf(z[k] - max);
#pragma unroll
    for (int k = 0; k < 3; ++k) z[k] /= sum;
  } else if (o.computed()) {
#pragma unroll
    for (int k = 0; k < 3; ++k) z[k] = sigmoid(z[k]);
  }
  if (lane == 0)
#pragma unroll
    for (int k = 0; k < 3; ++k) a.gate[(k * a.B + b) * a.Hkv + g] = z[k];
}

// ---- kernel 1. blockIdx.x: the compressed branch's chunks, then the window branch's, then the gate ----

template <class T, int V, int kHeads, bool kHoldsFc1>
__global__ void __launch_bounds__(kBranchThreads, 2)
    decode_branches_kernel(Decode<T> a, GateMlp<T> mlp, GateKernelOptions gate_options) {
  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  const bool gates = static_cast<int>(blockIdx.x) == a.chunks[0] + a.chunks[2];
  const GateMemory<T, kHoldsFc1> gate_memory(shared, mlp);
  if (gates && gate_options.computed())
    load_gate_weights(mlp, gate_memory);  // runs before pdl_wait(), since the previous kernel does not write weights
  pdl_wait();
  const int g = blockIdx.y, b = blockIdx.z;
  if (gates) return gate_of(a, mlp, gate_options, gate_memory, b, g);
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
  a.tile_blocks =
      static_cast<int>(std::clamp<int64_t>(kScoreTile * c.d / c.l_sel, 1, std::min<int64_t>(kMaxTile, most_of_share)));
  TRIAD_CHECK(c.n_sel <= kMaxSelected, "nsa_decode: lists of {} blocks, at most {} on a GPU", c.n_sel, kMaxSelected);

  Scratch::Scope scope(ctx.scratch);
  const int64_t groups = int64_t{a.B} * a.Hkv;
  a.scores = alloc_floats(scope, int64_t{a.B} * a.Hq * a.rows[0], "scores");
  alloc_partials(scope, a);
  a.gate = alloc_floats(scope, 3 * groups, "gate");
  a.best =
      reinterpret_cast<uint64_t*>(alloc_floats(scope, groups * kClusterCtas * a.n_sel * 2, "best blocks of shares"));
  launch_branches(ctx, a, vectors, gate_mlp<T>(gate),
                  {static_cast<int>(c.gate.force), c.gate.uniform, c.gate.kind == GateKind::softmax,
                   static_cast<float>(1.0 / c.gate.temperature)});
  launch_selected(ctx, a, vectors);
}

}  // namespace

void nsa_decode(Context& ctx, Tensor out, const DecodeIn& in, const GateWeights& gate, const NsaConfig& c,
                const DecodeProbe& probe) {
  dispatch_gpu_float(out.dtype, [&]<class T>() { decode<T>(ctx, out, in, gate, c, probe); });
}

}  // namespace triad::cuda
