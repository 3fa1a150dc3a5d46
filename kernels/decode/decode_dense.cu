// Dense attention for one new token, over all keys in the cache. There are two chunk kernels, both followed by the
// combination (decode/decode.cuh). dense_decode_chunks_kernel takes any shape, as NSA's branches do (attend_chunk).
// dense_decode_kernel takes bf16 and heads of 64 or 128, on tensor cores. It is bound by memory. Its chunks, here
// called spans, are longer, since combining many short ones would take longer than reading them. A product has 16 heads
// (zero rows if a group has fewer) and 16 keys.
//   A CTA processes one span. Each warp independently processes every eighth 16-key tile. Keys and values are loaded
//   directly into the MMA operands' registers: the next keys during the softmax of the current ones, the next values
//   after the current ones have been used. Element order along k does not matter as long as keys and queries share it;
//   value column order does not matter as long as the sums are stored in that order. So a lane loads whole 16-byte
//   vectors.
//   At the span's end a CTA combines its warps' sums and writes a chunk's partial sums (decode/decode.cuh).
// Probabilities are rounded to bf16 for their product with the values, as in the forward pass; their sum is not
// rounded.
#include <algorithm>

#include "kernels/common/launch_pdl.cuh"
#include "kernels/decode/decode.cuh"

namespace triad::cuda {
namespace {

using bf16 = __nv_bfloat16;
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTile = 16;               // keys that a warp processes at a time; heads per product
constexpr int kRound = kWarps * kTile;  // keys that a CTA processes at a time
constexpr int kMaxSpans = 128;          // most spans per (sequence, group): with two groups, two CTAs per SM

// Shared memory where the warps' results are combined: each head's maximum, exponential sum and value sum.
template <int kDv>
struct DenseMemory {
  float max[kWarps][kTile], sum[kWarps][kTile];
  float o[kWarps][1][kDv];  // [warp][head][kDv]; the launch allocates G heads
};

template <int kDk, int kDv>
__global__ void __launch_bounds__(kThreads, kDk + kDv <= 128 ? 2 : 1) dense_decode_kernel(DenseDecode<bf16> a) {
  pdl_wait();
  constexpr int kSteps = kDk / 32;   // key vectors per lane: elements 8 (lane % 4) ... + 8, the next 32 further on
  constexpr int kBlocks = kDv / 64;  // 64-column value blocks; a lane has elements 8 (lane / 4) ... + 8 in each
  const int g = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = static_cast<int>(blockIdx.x) * a.chunk_keys;
  const int count = min(a.chunk_keys, a.keys(0, a.position[b]) - first);
  if (count <= 0 || !a.run[0]) return;

  const bf16* const q_rows = a.q.row(b, 0, int64_t{g} * a.G);
  const bf16* const k_rows = a.k[0].row(b, first, g) + lane % 4 * 8;
  const bf16* const v_rows = a.v[0].row(b, first, g) + lane / 4 * 8;
  uint4 q[2][kSteps], k[2][kSteps], v[4][kBlocks];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int head = lane / 4 + 8 * half;
      q[half][s] = head < a.G ? *reinterpret_cast<const uint4*>(q_rows + head * a.q.stride_h + lane % 4 * 8 + 32 * s)
                              : make_uint4(0, 0, 0, 0);
    }
  const auto load_keys = [&](int at) {  // loads keys at + lane / 4 and + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bf16* const row = k_rows + min(at + lane / 4 + 8 * half, count - 1) * a.k[0].stride_t;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) k[half][s] = *reinterpret_cast<const uint4*>(row + 32 * s);
    }
  };
  const auto load_values = [&](int at) {  // loads the values for keys at + 2 (lane % 4), + 1, + 8, + 9
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bf16* const row = v_rows + min(at + lane % 4 * 2 + i % 2 + i / 2 * 8, count - 1) * a.v[0].stride_t;
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) v[i][c] = *reinterpret_cast<const uint4*>(row + 64 * c);
    }
  };

  // Running softmax for heads lane / 4 and + 8. In every 64 columns a lane accumulates the 16 columns 16 (lane % 4) +
  // i.
  float max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, o[kBlocks * 8][4] = {};
  int at = warp * kTile;
  if (at < count) load_keys(at), load_values(at);
#pragma unroll 1
  for (; at < count; at += kRound) {
    float score[2][4] = {};  // keys 8 half + 2 (lane % 4), + 1 for head lane / 4, then for head lane / 4 + 8
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 q0 = q[0][s], q1 = q[1][s], key = k[half][s];
        mma_m16n8k16(score[half], {q0.x, q1.x, q0.y, q1.y}, key.x, key.y);
        mma_m16n8k16(score[half], {q0.z, q1.z, q0.w, q1.w}, key.z, key.w);
      }
    if (at + kRound < count) load_keys(at + kRound);
    uint32_t p[2][2];  // probabilities: [keys 0 to 7, 8 to 15][the lane's first, second head]
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float tile_max = -INFINITY;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& s = score[half][2 * h + i];
          s = at + 8 * half + lane % 4 * 2 + i < count ? s * a.scale_log2 : -INFINITY;
          tile_max = fmaxf(tile_max, s);
        }
      tile_max = warp_max<4>(tile_max);
      const float new_max = fmaxf(max[h], tile_max), scale = exp2_approx(max[h] - new_max);
      max[h] = new_max, sum[h] *= scale;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float p0 = exp2_approx(score[half][2 * h] - new_max), p1 = exp2_approx(score[half][2 * h + 1] - new_max);
        sum[h] += p0 + p1;
        p[half][h] = pack_bf16(p0, p1);
      }
#pragma unroll
      for (int i = 0; i < kBlocks * 8; ++i) o[i][2 * h] *= scale, o[i][2 * h + 1] *= scale;
    }
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      const auto words = [&](int key, int i) {  // two adjacent columns in one key
        const uint4& x = v[key][c];
        return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
      };
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // pairs two adjacent keys' columns: the lower halves, then the upper halves
        const uint32_t a0 = words(0, i), a1 = words(1, i), b0 = words(2, i), b1 = words(3, i);
        mma_m16n8k16(o[c * 8 + 2 * i], {p[0][0], p[0][1], p[1][0], p[1][1]}, __byte_perm(a0, a1, 0x5410),
                     __byte_perm(b0, b1, 0x5410));
        mma_m16n8k16(o[c * 8 + 2 * i + 1], {p[0][0], p[0][1], p[1][0], p[1][1]}, __byte_perm(a0, a1, 0x7632),
                     __byte_perm(b0, b1, 0x7632));
      }
    }
    if (at + kRound < count) load_values(at + kRound);
  }
  pdl_trigger();

  DenseMemory<kDv>& memory = *reinterpret_cast<DenseMemory<kDv>*>(dynamic_shared());
  float* const sums = memory.o[0][0];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] = quad_sum(sum[h]);
    const int head = lane / 4 + 8 * h;
    if (lane % 4 == 0) memory.max[warp][head] = max[h], memory.sum[warp][head] = sum[h];
    if (head >= a.G) continue;
#pragma unroll
    for (int c = 0; c < kBlocks; ++c)
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        const int e = 2 * h + i / 8, tile = c * 8 + i % 8;
        *reinterpret_cast<float4*>(sums + (warp * a.G + head) * kDv + 64 * c + lane % 4 * 16 + i) =
            make_float4(o[tile][e], o[tile + 1][e], o[tile + 2][e], o[tile + 3][e]);
      }
  }
  __syncthreads();
  const int64_t partial = a.partial(b, g, 0, blockIdx.x);
#pragma unroll 1
  for (int i = threadIdx.x; i < a.G * kDv; i += kThreads) {
    const int head = i / kDv;
    float all = -INFINITY, total = 0, out = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all = fmaxf(all, memory.max[w][head]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2_approx(memory.max[w][head] - all);
      total = fmaf(memory.sum[w][head], weight, total);
      out = fmaf(sums[w * a.G * kDv + i], weight, out);
    }
    a.partial_o[partial * kDv + i] = out;
    if (i % kDv == 0) a.partial_sum[partial + head] = make_float2(all, total);
  }
  if (threadIdx.x == 0 && a.reads != nullptr) atomicAdd(a.reads, static_cast<unsigned long long>(count));
}

template <int kDk, int kDv>
void launch_spans(Context& ctx, const DenseDecode<bf16>& a) {
  const size_t o = sizeof(float) * static_cast<size_t>(kWarps * (a.G - 1) * kDv);
  launch_pdl(ctx, "dense_decode", dense_decode_kernel<kDk, kDv>,
             dim3(static_cast<unsigned>(a.chunks[0]), static_cast<unsigned>(a.Hkv), static_cast<unsigned>(a.B)),
             dim3(kThreads), sizeof(DenseMemory<kDv>) + o, a);
}

// Launches dense_decode_kernel, with spans as chunks. Returns false and does nothing if it does not support the shape.
bool launch_on_tensor_cores(Context& ctx, DenseDecode<bf16>& a, bool vectors) {
  const bool heads_of_64 = a.dk == 64 && a.dv == 64, heads_of_128 = a.dk == 128 && a.dv == 128;
  if (!vectors || a.G > kTile || !(heads_of_64 || heads_of_128)) return false;
  a.chunk_keys = round_up(ceil_div(a.rows[0], kMaxSpans), kRound);
  a.chunks[0] = ceil_div(a.rows[0], a.chunk_keys);
  heads_of_64 ? launch_spans<64, 64>(ctx, a) : launch_spans<128, 128>(ctx, a);
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
  if (!launched && !vectors)
    launch_chunks<T, 1, 2>(ctx, a);
  else if (!launched && a.G <= 2)
    launch_chunks<T, kVector<T>, 2>(ctx, a);
  else if (!launched)
    launch_chunks<T, kVector<T>, 8>(ctx, a);
  launch_combine(ctx, "dense_decode combine", a);
}

}  // namespace

void dense_decode(Context& ctx, Tensor out, const DenseDecodeIn& in, const DecodeProbe& probe) {
  dispatch_gpu_float(out.dtype, [&]<class T>() { decode<T>(ctx, out, in, probe); });
}

}  // namespace triad::cuda
