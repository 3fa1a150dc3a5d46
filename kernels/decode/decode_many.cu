// NSA's attention for one new token in each of many sequences (bf16, heads of 64 or 128): with enough sequences, one
// CTA for each (sequence, group) fills the card, so nothing is split over CTAs and no partial sums pass through memory.
// A CTA computes, on tensor cores (decode/decode_mma.cuh):
//   1. the compressed branch, whose scores it stores for the selection, while the window's rows begin to come to L2;
//   2. the gate, and the compressed branch's outputs;
//   3. the selection (decode/decode_select.cuh);
//   4. the selected and the window branch, and the sum of all branches by their gates, rounded as in the forward pass.
// A CTA's warps share a branch's tiles, so the sums' order depends on the number of warps: 16, one CTA on an SM, where
// kWideSequences sequences or fewer have few groups; else 8, so that two CTAs on an SM fill each other's pauses. It
// depends on nothing else in the batch.
#include <algorithm>

#include "kernels/common/launch_pdl.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/decode/decode_gate.cuh"
#include "kernels/decode/decode_mma.cuh"
#include "kernels/decode/decode_select.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;
constexpr int kWideSequences = 64, kWideGroups = 4;  // most sequences, and groups, for which a CTA has 16 warps

// Where the parts of a CTA's shared memory begin, in bytes: the warps' sums of the compressed and then the selected
// branch, those of the window branch, the compressed branch's outputs, the gate and the selection.
template <int kDv, int kWarps>
struct ManyLayout {
  int window, compressed, gate, select, size;
  __host__ __device__ ManyLayout(const Decode<bf16>& a, int gate_floats) {
    constexpr int kFloat = static_cast<int>(sizeof(float));
    window = WarpSums<kWarps, kDv>::bytes(a.G);
    compressed = 2 * window;
    gate = compressed + kFloat * a.G * kDv;
    select = round_up(gate + kFloat * gate_floats, 16);
    const int tile = a.tile_blocks * ceil_div(a.l_sel, a.d) + ceil_div(a.l, a.d);
    size = select + static_cast<int>(sizeof(SelectMemory<32 * kWarps>)) + kFloat * tile;
  }
};

// Requests a branch's first rows of 128-byte lines from memory, before they are needed.
template <int kThreads, int kWidth>
__device__ void request_rows(const bf16* rows, int64_t stride, int count) {
  constexpr int kLine = 64;  // elements
#pragma unroll 1
  for (int i = threadIdx.x; i < count * (kWidth / kLine); i += kThreads)
    prefetch_l2(rows + i / (kWidth / kLine) * stride + i % (kWidth / kLine) * kLine);
}

template <int kDk, int kDv, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kDk + kDv <= 128 ? 16 / kWarps : 1)
    decode_many_kernel(Decode<bf16> a, GateMlp<bf16> mlp, GateKernelOptions gate_options) {
  constexpr int kThreads = 32 * kWarps, kRound = kWarps * kTileKeys;
  unsigned char* const shared = dynamic_shared();
  const ManyLayout<kDv, kWarps> layout(a, gate_options.computed() ? GateMemory<bf16, true>::floats(mlp) : 0);
  auto& sums = *reinterpret_cast<WarpSums<kWarps, kDv>*>(shared);
  auto& window_sums = *reinterpret_cast<WarpSums<kWarps, kDv>*>(shared + layout.window);
  float* const compressed = reinterpret_cast<float*>(shared + layout.compressed);
  auto& select = *reinterpret_cast<SelectMemory<kThreads>*>(shared + layout.select);
  const GateMemory<bf16, true> gate_memory(reinterpret_cast<float*>(shared + layout.gate), mlp);
  if (gate_options.computed()) load_gate_weights<kThreads>(mlp, gate_memory);
  pdl_wait();
  const int g = blockIdx.y, b = blockIdx.z, at = a.position[b], outputs = a.G * kDv;
  int keys[3];
#pragma unroll
  for (int branch = 0; branch < 3; ++branch) keys[branch] = a.run[branch] ? a.keys(branch, at) : 0;
  const auto same_row = [](int, int i) { return i; };
  const auto keep_none = [](int, int, float) {};

  TileAttention<kDk, kDv> attention;
  attention.load_queries(a.q.row(b, 0, int64_t{g} * a.G), a.q.stride_h, a.G);
  const auto attend = [&](int branch, auto&& row_of, auto&& keep) {
    attention.template attend<kRound>(a.k[branch].row(b, 0, g), a.k[branch].stride_t, a.v[branch].row(b, 0, g),
                                      a.v[branch].stride_t, keys[branch], a.scale_log2, row_of, keep);
  };
  float* const scores = a.scores + (int64_t{b} * a.Hq + g * a.G) * a.rows[0];
  attend(0, same_row, [&](int head, int key, float score) {
    if (head < a.G) scores[int64_t{head} * a.rows[0] + key] = score;
  });
  attention.store(sums, a.G);
  request_rows<kThreads, kDk>(a.k[2].row(b, 0, g), a.k[2].stride_t, keys[2]);
  request_rows<kThreads, kDv>(a.v[2].row(b, 0, g), a.v[2].stride_t, keys[2]);
  gate_of<kThreads>(a, mlp, gate_options, gate_memory, b, g);
  __syncthreads();

  // A branch's output, rounded; 0 for a branch without keys.
  const auto output = [&](const WarpSums<kWarps, kDv>& from, int branch, int i) {
    if (keys[branch] == 0) return 0.0f;
    const auto total = from.total(a.G, i);
    return to_float(from_float<bf16>(total.o / total.sum));
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < outputs; i += kThreads) {
    compressed[i] = output(sums, 0, i);
    if (keys[0] == 0 || i % kDv != 0) continue;
    const auto total = sums.total(a.G, i);
    select.lse[i / kDv] = total.max + log2f(total.sum);
  }
  __syncthreads();

  if (a.run[1]) {
    const ListPlan plan(a, at);
    list_blocks(a, plan, select, b, g, at,
                [&] { select_range(a, plan, select, b, g, at, plan.init_end, plan.candidate_end); });
    attend(1, ListedRows{select.list, a.l_sel}, keep_none);
    attention.store(sums, a.G);
  }
  attend(2, same_row, keep_none);
  attention.store(window_sums, a.G);
  pdl_trigger();
  __syncthreads();

  float gates[3];
#pragma unroll
  for (int branch = 0; branch < 3; ++branch) gates[branch] = a.gate[(branch * a.B + b) * a.Hkv + g];
#pragma unroll 1
  for (int i = threadIdx.x; i < outputs; i += kThreads) {
    float out = 0;
    if (keys[0] > 0) out = fmaf(gates[0], compressed[i], out);
    out = fmaf(gates[1], output(sums, 1, i), out);
    out = fmaf(gates[2], output(window_sums, 2, i), out);
    a.out[(int64_t{b} * a.Hq + g * a.G) * kDv + i] = from_float<bf16>(out);
  }
  if (a.reads != nullptr && threadIdx.x < 3)
    atomicAdd(a.reads + threadIdx.x, static_cast<unsigned long long>(a.run[threadIdx.x] ? a.keys(threadIdx.x, at) : 0));
}

template <int kDk, int kDv, int kWarps>
bool launch_for(Context& ctx, Decode<bf16> a, const GateMlp<bf16>& mlp, const GateKernelOptions& gate) {
  a.tile_blocks = tile_blocks(a.l_sel, a.d, std::min(32 * kWarps - kMaxSelected, ceil_div(a.rows[1], a.l_sel)));
  const ManyLayout<kDv, kWarps> layout(a, gate.computed() ? GateMemory<bf16, true>::floats(mlp) : 0);
  if (layout.size > shared_limits(ctx).cta_bytes) return false;
  launch_pdl(ctx, "nsa_decode many", decode_many_kernel<kDk, kDv, kWarps>,
             dim3(1, static_cast<unsigned>(a.Hkv), static_cast<unsigned>(a.B)), dim3(32 * kWarps),
             static_cast<size_t>(layout.size), a, mlp, gate);
  return true;
}

}  // namespace

bool launch_many(Context& ctx, const Decode<bf16>& a, bool vectors, const GateMlp<bf16>& mlp,
                 const GateKernelOptions& gate) {
  if (a.B <= kFewSequences || !vectors || a.G > kTileHeads || a.l_sel < kTileKeys) return false;
  if (a.dk == 128 && a.dv == 128) return launch_for<128, 128, 8>(ctx, a, mlp, gate);
  if (a.dk != 64 || a.dv != 64) return false;
  const bool wide = a.B <= kWideSequences && a.Hkv <= kWideGroups;
  return wide ? launch_for<64, 64, 16>(ctx, a, mlp, gate) : launch_for<64, 64, 8>(ctx, a, mlp, gate);
}

}  // namespace triad::cuda
