// NSA for one new token a sequence. The work is reading some thousands of keys, so it is cut into chunks of 64 keys of
// one (sequence, group), a CTA each, whose partial softmaxes a last kernel joins: at 64k tokens 64 chunks of compressed
// keys, 16 of selected and 8 of the window for each group, on 132 SMs. All heads of a group share each key that is
// read. Three kernels, in this order because of what waits for what:
//   1. chunks of the compressed branch, which leave their scores for the selection, and of the window; the gate.
//   2. the selection and a chunk of the selected branch. Every CTA of a (sequence, group) selects for itself: the same
//      lists come out, and none waits for another.
//   3. the branches' chunks joined, rounded as the forward pass rounds them, and summed by their gates.
// Sizes of grids and scratch come from the cache's room alone, and positions are read from the device, so one recorded
// step serves all positions; chunks beyond a position end at once. Softmaxes are in powers of 2.
#include <algorithm>
#include <cmath>

#include "kernels/bthd.cuh"
#include "kernels/launch_behind.cuh"
#include "kernels/nsa_decode.h"
#include "kernels/nsa_gate.cuh"
#include "kernels/ptx.cuh"

namespace triad::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kChunk = 64;           // keys of a CTA
constexpr int kColumns = 64;         // of the values at a time: two a lane
constexpr int kBranchThreads = 256;  // kernel 1
constexpr int kSelectThreads = 512;  // kernel 2: the selection has more to do than a chunk
constexpr int kJoinThreads = 256;    // kernel 3
constexpr int kScoreTile = 4096;     // compressed keys that the selection looks at together
constexpr int kMostSelected = 64;    // n
constexpr int kMostHeads = 32;       // G

__host__ __device__ constexpr int round_up_to(int n, int to) { return (n + to - 1) / to * to; }

// Everything that the kernels share.
template <class T>
struct Decode {
  Bthd<const T> q;
  Bthd<const T> k[3], v[3];
  const int32_t* position;
  int Hq, Hkv, G, dk, dv;
  int rows[3];    // of a branch's cache; cmp: Tc, win: the ring
  int chunks[3];  // of a branch, where the cache is full
  int l, d, l_sel, n_sel, init_blocks, local_blocks;
  int all_blocks, tile_blocks;  // of a full cache; of a tile of the selection's scores
  bool run[3];
  float scale_log2;     // log2(e) / sqrt(dk)
  float* scores;        // [B,Hq,Tc]: of the compressed branch, in powers of 2
  float* partial_o;     // [B,Hkv,all chunks,G,dv]: sums of 2^(score - max) v
  float2* partial_sum;  // [B,Hkv,all chunks,G]: max, sum of 2^(score - max)
  float* gate;          // [3,B,Hkv]
  T* out;               // [B,Hq,dv]
  unsigned long long* reads;

  // Keys that the token at `position` sees, of the compressed branch and of the window.
  __device__ int visible(int branch, int at) const {
    if (branch == 0) return at + 1 < l ? 0 : min(rows[0], (at + 1 - l) / d + 1);
    return min(rows[2], at + 1);
  }
  __device__ int first_chunk(int branch) const {  // they lie in the order cmp, win, sel
    return branch == 0 ? 0 : branch == 2 ? chunks[0] : chunks[0] + chunks[2];
  }
  __device__ int64_t partial(int b, int g, int chunk) const {
    return ((int64_t{b} * Hkv + g) * (chunks[0] + chunks[1] + chunks[2]) + chunk) * G;
  }
};

// Two neighbouring values of a row as they are in memory.
template <class T, bool kPairs>
struct ValuePair {
  T x[2];
  __device__ void load(const T* row, int j, int width) {
    if constexpr (kPairs) {
      using Word = std::conditional_t<sizeof(T) == 2, uint32_t, uint2>;
      if (j < width)
        *reinterpret_cast<Word*>(x) = *reinterpret_cast<const Word*>(row + j);
      else
        x[0] = x[1] = from_float<T>(0);
    } else {
      x[0] = j < width ? row[j] : from_float<T>(0);
      x[1] = j + 1 < width ? row[j + 1] : from_float<T>(0);
    }
  }
};

// Shared memory of a chunk: queries of the group, padded to whole blocks of heads; probabilities; sums of the warps.
template <int kHeads, int kThreads>
struct ChunkMemory {
  float *q, *p, *sums;
  int heads;  // padded
  __host__ __device__ static int64_t floats(int G, int dk) {
    return int64_t{round_up_to(G, kHeads)} * (round_up_to(dk, 4) + kChunk) + kThreads / 32 * kHeads * kColumns;
  }
  __device__ ChunkMemory(float* memory, int G, int dk) : heads(round_up_to(G, kHeads)) {
    q = memory;
    p = q + heads * round_up_to(dk, 4);
    sums = p + heads * kChunk;
  }
};

// One chunk: keys [0, count) of it, key i in row row_of(i) of branch's cache. Leaves the partial sums of its heads and,
// where scores is given, the scores of the group's heads, scores[head * stride + i].
template <class T, int V, int kHeads, int kThreads, class RowOf>
__device__ void attend_chunk(const Decode<T>& a, const ChunkMemory<kHeads, kThreads>& memory, int branch, int chunk,
                             int b, int g, int count, RowOf&& row_of, float* scores, int64_t scores_stride) {
  constexpr int kWarps = kThreads / 32, kLanes = kThreads / kChunk;  // lanes of a key
  constexpr int kHeld = kChunk / kWarps;                             // keys of a warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q_row = round_up_to(a.dk, 4);

  // The first columns of the values are on their way while the scores are made.
  ValuePair<T, (V > 1)> held[kHeld];
  const auto load_values = [&](int j0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int key = warp + kWarps * i;
      held[i].load(a.v[branch].row(b, key < count ? row_of(key) : row_of(0), g), key < count ? j0 + 2 * lane : a.dv,
                   a.dv);
    }
  };
  load_values(0);

  const int key = threadIdx.x / kLanes, part = threadIdx.x % kLanes;
  const T* const k_row = a.k[branch].row(b, row_of(min(key, count - 1)), g);
  for (int h0 = 0; h0 < a.G; h0 += kHeads) {
    float s[kHeads] = {};
    for (int j = part * V; j < a.dk; j += kLanes * V) {
      float x[V];
      load_vector<V>(x, k_row + j);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float qv[V];
        load_vector<V>(qv, static_cast<const float*>(memory.q + (h0 + h) * q_row + j));
#pragma unroll
        for (int i = 0; i < V; ++i) s[h] = fmaf(qv[i], x[i], s[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int o = kLanes / 2; o > 0; o /= 2) s[h] += __shfl_xor_sync(kAllLanes, s[h], o);
      if (part == 0) memory.p[key * memory.heads + h0 + h] = key < count ? s[h] : -INFINITY;
    }
  }
  __syncthreads();

  const int64_t partial = a.partial(b, g, a.first_chunk(branch) + chunk);
  for (int h = warp; h < memory.heads; h += kWarps) {
    float* const s0 = memory.p + lane * memory.heads + h;
    float* const s1 = s0 + 32 * memory.heads;
    if (scores != nullptr && h < a.G) {
      if (lane < count) scores[h * scores_stride + lane] = *s0;
      if (lane + 32 < count) scores[h * scores_stride + lane + 32] = *s1;
    }
    const float max = warp_max(fmaxf(*s0, *s1));
    *s0 = exp2_approx(*s0 - max), *s1 = exp2_approx(*s1 - max);
    const float sum = warp_sum(*s0 + *s1);
    if (lane == 0 && h < a.G) a.partial_sum[partial + h] = make_float2(max, sum);
  }
  __syncthreads();

  for (int j0 = 0; j0 < a.dv; j0 += kColumns) {
    if (j0 > 0) load_values(j0);
    for (int h0 = 0; h0 < a.G; h0 += kHeads) {
      float o[kHeads][2] = {};
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const float v0 = to_float(held[i].x[0]), v1 = to_float(held[i].x[1]);
        const float* const p = memory.p + (warp + kWarps * i) * memory.heads + h0;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) o[h][0] = fmaf(p[h], v0, o[h][0]), o[h][1] = fmaf(p[h], v1, o[h][1]);
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
        *reinterpret_cast<float2*>(memory.sums + (warp * kHeads + h) * kColumns + 2 * lane) =
            make_float2(o[h][0], o[h][1]);
      __syncthreads();
      for (int i = threadIdx.x; i < kHeads * kColumns; i += kThreads) {
        const int h = h0 + i / kColumns, j = j0 + i % kColumns;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += memory.sums[w * kHeads * kColumns + i];
        if (h < a.G && j < a.dv) a.partial_o[(partial + h) * a.dv + j] = sum;
      }
      __syncthreads();
    }
  }
  if (threadIdx.x == 0 && a.reads != nullptr) atomicAdd(a.reads + branch, static_cast<unsigned long long>(count));
}

// q of the group, scaled, zeros for the heads that pad it. A barrier has to follow.
template <class T, int kHeads, int kThreads>
__device__ void load_queries(const Decode<T>& a, const ChunkMemory<kHeads, kThreads>& memory, int b, int g) {
  const int q_row = round_up_to(a.dk, 4);
  for (int i = threadIdx.x; i < memory.heads * a.dk; i += kThreads) {
    const int h = i / a.dk, j = i % a.dk;
    memory.q[h * q_row + j] = h < a.G ? to_float(a.q.row(b, 0, g * a.G + h)[j]) * a.scale_log2 : 0;
  }
}

// The gate of one (sequence, group): forced, uniform, or its MLP on the mean of the group's queries.
struct GateKernelOptions {
  int force;
  bool uniform, softmax;
  float inverse_temperature;
};
template <class T>
__device__ void gate_of(const Decode<T>& a, const GateMlp<T>& mlp, const GateKernelOptions& o, float* memory, int b,
                        int g, int B) {
  float* const mean = memory;              // [dk]
  float* const hidden = mean + mlp.width;  // [dk/2]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool computed = o.force < 0 && !o.uniform;
  if (computed) {
    for (int j = threadIdx.x; j < mlp.width; j += kBranchThreads) {
      float sum = 0;
      for (int h = 0; h < a.G; ++h) sum += to_float(a.q.row(b, 0, g * a.G + h)[j]);
      mean[j] = sum / static_cast<float>(a.G);
    }
    __syncthreads();
    for (int j = warp; j < mlp.hidden; j += kBranchThreads / 32) {
      float sum = 0;
      for (int i = lane; i < mlp.width; i += 32) sum = fmaf(mean[i], to_float(mlp.fc1_w[j * mlp.fc1_stride + i]), sum);
      sum = warp_sum(sum);
      if (lane == 0) {
        const float pre = sum + to_float(mlp.fc1_b[j]);
        hidden[j] = pre * sigmoid(pre);
      }
    }
    __syncthreads();
  }
  if (warp > 0) return;
  float z[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    z[k] = k == o.force ? 1.0f : o.uniform && o.force < 0 ? 1.0f / 3.0f : 0.0f;
    if (!computed) continue;
    float sum = 0;
    for (int j = lane; j < mlp.hidden; j += 32) sum = fmaf(hidden[j], to_float(mlp.fc2_w[k * mlp.fc2_stride + j]), sum);
    z[k] = (warp_sum(sum) + to_float(mlp.fc2_b[k])) * o.inverse_temperature;
  }
  if (computed && o.softmax) {
    const float max = fmaxf(z[0], fmaxf(z[1], z[2]));
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 3; ++k) sum += z[k] = expf(z[k] - max);
#pragma unroll
    for (int k = 0; k < 3; ++k) z[k] /= sum;
  } else if (computed) {
#pragma unroll
    for (int k = 0; k < 3; ++k) z[k] = sigmoid(z[k]);
  }
  if (lane == 0)
#pragma unroll
    for (int k = 0; k < 3; ++k) a.gate[(k * B + b) * a.Hkv + g] = z[k];
}

// Kernel 1. blockIdx.x: chunks of the compressed branch, then of the window, then (where there are gates) the gate.
template <class T, int V, int kHeads>
__global__ void __launch_bounds__(kBranchThreads, 2)
    branches_kernel(Decode<T> a, GateMlp<T> mlp, GateKernelOptions gate_options) {
  let_next_come();
  wait_for_kernel_ahead();
  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  const int g = blockIdx.y, b = blockIdx.z, at = a.position[b];
  int chunk = blockIdx.x;
  if (chunk == a.chunks[0] + a.chunks[2]) return gate_of(a, mlp, gate_options, shared, b, g, gridDim.z);
  const int branch = chunk < a.chunks[0] ? 0 : 2;
  if (branch == 2) chunk -= a.chunks[0];
  const int first = chunk * kChunk, count = min(kChunk, a.visible(branch, at) - first);
  if (count <= 0 || !a.run[branch]) return;
  const ChunkMemory<kHeads, kBranchThreads> memory(shared, a.G, a.dk);
  load_queries(a, memory, b, g);
  __syncthreads();
  float* const scores = branch == 0 ? a.scores + (int64_t{b} * a.Hq + g * a.G) * a.rows[0] + first : nullptr;
  attend_chunk<T, V>(
      a, memory, branch, chunk, b, g, count, [&](int i) { return first + i; }, scores, a.rows[0]);
}

// The selection of one (sequence, group) by a CTA.
struct SelectMemory {
  int list[kMostSelected], chosen[kMostSelected];
  float lse[kMostHeads];                          // of the group's heads, in powers of 2
  uint2 top[kSelectThreads / 32][kMostSelected];  // each warp's best: key, block; descending
  uint32_t keys[1];                               // of all candidates; as long as there are blocks
};

// A score's order as an integer, never 0: no score is negative.
__device__ __forceinline__ uint32_t order_of(float score) { return __float_as_uint(score > 0 ? score : 0.0f) + 1; }

// The blocks' scores by the probabilities of the compressed branch.
template <class T>
__device__ void score_blocks(const Decode<T>& a, SelectMemory& memory, float* sums, int b, int g, int at, int begin,
                             int end) {
  const int visible = a.visible(0, at), chunks = (visible + kChunk - 1) / kChunk;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int h = warp; h < a.G; h += kSelectThreads / 32) {
    float max = -INFINITY, sum = 0;
    for (int c = lane; c < chunks; c += 32) max = fmaxf(max, a.partial_sum[a.partial(b, g, c) + h].x);
    max = warp_max(max);
    for (int c = lane; c < chunks; c += 32) {
      const float2 part = a.partial_sum[a.partial(b, g, c) + h];
      sum += part.y * exp2f(part.x - max);
    }
    sum = warp_sum(sum);
    if (lane == 0) memory.lse[h] = max + log2f(sum);
  }
  __syncthreads();
  // Blocks in tiles: first the heads' probabilities of the tile's compressed keys, summed, then what each block gets.
  const float* const scores = a.scores + (int64_t{b} * a.Hq + g * a.G) * a.rows[0];
  const float inverse_l = 1.0f / static_cast<float>(a.l);
  const auto first_of = [&](int j) { return j * a.l_sel < a.l ? 0 : (j * a.l_sel - a.l) / a.d + 1; };
  const auto end_of = [&](int j) { return min(visible, ((j + 1) * a.l_sel - 1) / a.d + 1); };
  for (int j0 = begin; j0 < end; j0 += a.tile_blocks) {
    const int j1 = min(end, j0 + a.tile_blocks), c0 = first_of(j0), c1 = end_of(j1 - 1);
    for (int c = c0 + threadIdx.x; c < c1; c += 2 * kSelectThreads) {  // two keys of eight heads on their way together
      const bool two = c + kSelectThreads < c1;
      float p[2] = {};
      for (int h0 = 0; h0 < a.G; h0 += 8) {
        float x[2][8];
#pragma unroll
        for (int h = 0; h < 8; ++h) {
          const float* const row = scores + int64_t{h0 + h} * a.rows[0] + c;
          x[0][h] = h0 + h < a.G ? row[0] - memory.lse[h0 + h] : -INFINITY;
          x[1][h] = two && h0 + h < a.G ? row[kSelectThreads] - memory.lse[h0 + h] : -INFINITY;
        }
#pragma unroll
        for (int h = 0; h < 8; ++h) p[0] += exp2_approx(x[0][h]), p[1] += exp2_approx(x[1][h]);
      }
      sums[c - c0] = p[0];
      if (two) sums[c + kSelectThreads - c0] = p[1];
    }
    __syncthreads();
    for (int j = j0 + threadIdx.x; j < j1; j += kSelectThreads) {
      const int low = j * a.l_sel, high = low + a.l_sel, last = end_of(j);
      float score = 0;
      for (int c = first_of(j); c < last; ++c) {
        const int shared = min(c * a.d + a.l, high) - max(c * a.d, low);
        score = fmaf(static_cast<float>(shared) * inverse_l, sums[c - c0], score);
      }
      memory.keys[j] = order_of(score);
    }
    __syncthreads();
  }
}

// The `slots` best of the blocks [begin, end) into memory.chosen, in no particular order: each warp lists the best of
// its share, then one warp merges the lists. (Order descending, block ascending) is unique, so the result is too.
__device__ void choose_blocks(SelectMemory& memory, int begin, int end, int slots) {
  constexpr int kWarps = kSelectThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int share = (end - begin + kWarps - 1) / kWarps, first = begin + warp * share, last = min(end, first + share);
  const auto best_of_lane = [&] {
    uint2 best = make_uint2(0, 0);
    for (int j = first + lane; j < last; j += 32)
      if (memory.keys[j] > best.x) best = make_uint2(memory.keys[j], j);
    return best;
  };
  const auto best_of_warp = [&](const uint2& mine) {
    const uint32_t key = __reduce_max_sync(kAllLanes, mine.x);
    return make_uint2(key, __reduce_min_sync(kAllLanes, mine.x == key ? mine.y : 0xffffffffu));
  };
  uint2 mine = best_of_lane();
  for (int r = 0; r < slots; ++r) {
    const uint2 best = best_of_warp(mine);
    if (lane == 0) memory.top[warp][r] = best;
    if (best.x != 0 && mine.x == best.x && mine.y == best.y) {
      memory.keys[best.y] = 0;  // only this lane looks at it
      mine = best_of_lane();
    }
  }
  __syncthreads();
  if (warp == 0) {
    int next = 0;
    for (int r = 0; r < slots; ++r) {
      const uint2 head = lane < kWarps && next < slots ? memory.top[lane][next] : make_uint2(0, 0);
      const uint2 best = best_of_warp(head);
      if (head.x == best.x && head.y == best.y) ++next;
      if (lane == 0) memory.chosen[r] = static_cast<int>(best.y);
    }
  }
  __syncthreads();
}

// The list of the token at `at`, ascending, in memory.list; returns its length.
template <class T>
__device__ int list_blocks(const Decode<T>& a, SelectMemory& memory, float* sums, int b, int g, int at) {
  const int current = at / a.l_sel, complete = (at + 1) / a.l_sel;
  const int init_end = min(a.init_blocks, current + 1);
  const int local_begin = max(init_end, current - a.local_blocks + 1);
  const int candidate_end = max(init_end, min(complete, local_begin));
  const int slots = a.n_sel - init_end - (current + 1 - local_begin);
  int free = candidate_end - init_end;
  if (free > slots) {
    free = slots;
    if (slots > 0) {
      score_blocks(a, memory, sums, b, g, at, init_end, candidate_end);
      choose_blocks(memory, init_end, candidate_end, slots);
    }
    for (int r = threadIdx.x; r < slots; r += kSelectThreads) {
      int rank = 0;
      for (int i = 0; i < slots; ++i) rank += memory.chosen[i] < memory.chosen[r];
      memory.list[init_end + rank] = memory.chosen[r];
    }
  } else {
    for (int r = threadIdx.x; r < free; r += kSelectThreads) memory.list[init_end + r] = init_end + r;
  }
  for (int r = threadIdx.x; r < init_end; r += kSelectThreads) memory.list[r] = r;
  for (int r = threadIdx.x; r <= current - local_begin; r += kSelectThreads)
    memory.list[init_end + free + r] = local_begin + r;
  __syncthreads();
  return init_end + free + current + 1 - local_begin;
}

// Kernel 2. blockIdx.x: a chunk of the listed blocks' tokens, which stand one behind the other; only the last block,
// that of the new token, may be cut off.
template <class T, int V, int kHeads>
__global__ void __launch_bounds__(kSelectThreads, 1) selected_kernel(Decode<T> a) {
  let_next_come();
  wait_for_kernel_ahead();
  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  const int chunk = blockIdx.x, g = blockIdx.y, b = blockIdx.z, at = a.position[b], first = chunk * kChunk;
  if (first >= (at / a.l_sel + 1) * a.l_sel) return;  // fewer blocks than n
  const ChunkMemory<kHeads, kSelectThreads> memory(shared, a.G, a.dk);
  SelectMemory& select = *reinterpret_cast<SelectMemory*>(
      shared + round_up_to(static_cast<int>(ChunkMemory<kHeads, kSelectThreads>::floats(a.G, a.dk)), 4));
  float* const sums = reinterpret_cast<float*>(select.keys + a.all_blocks);
  load_queries(a, memory, b, g);
  const int listed = list_blocks(a, select, sums, b, g, at);
  const int count = min(kChunk, (listed - 1) * a.l_sel + at % a.l_sel + 1 - first);
  if (count <= 0) return;
  const auto row_of = [&](int i) { return select.list[(first + i) / a.l_sel] * a.l_sel + (first + i) % a.l_sel; };
  attend_chunk<T, V>(a, memory, 1, chunk, b, g, count, row_of, nullptr, 0);
}

// Kernel 3: a CTA a head and sequence. Threads: columns x parts of the chunks, added in order.
template <class T>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(Decode<T> a, bool dense) {
  let_next_come();
  wait_for_kernel_ahead();
  constexpr int kParts = kJoinThreads / kColumns;
  __shared__ float sums[kParts][kColumns];
  __shared__ float maxes[3], totals[3];
  const int head = blockIdx.x, g = head / a.G, h = head % a.G, b = blockIdx.y, at = a.position[b];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto keys_of = [&](int branch) {
    if (dense && branch != 2) return 0;
    return branch == 1 ? min(a.n_sel, at / a.l_sel + 1) * a.l_sel - (a.l_sel - 1 - at % a.l_sel)
                       : a.visible(branch, at);
  };
  if (warp < 3) {  // a branch each
    const int chunks = (keys_of(warp) + kChunk - 1) / kChunk;
    const float2* const parts = a.partial_sum + a.partial(b, g, a.first_chunk(warp)) + h;
    float max = -INFINITY, total = 0;
    for (int c = lane; c < chunks; c += 32) max = fmaxf(max, parts[int64_t{c} * a.G].x);
    max = warp_max(max);
    for (int c = lane; c < chunks; c += 32) total += parts[int64_t{c} * a.G].y * exp2f(parts[int64_t{c} * a.G].x - max);
    total = warp_sum(total);
    if (lane == 0) maxes[warp] = max, totals[warp] = total;
  }
  __syncthreads();
  const int column = threadIdx.x % kColumns, part = threadIdx.x / kColumns;
  for (int j0 = 0; j0 < a.dv; j0 += kColumns) {
    const int j = j0 + column;
    float out = 0;
    for (int branch = 0; branch < 3; ++branch) {
      const int chunks = (keys_of(branch) + kChunk - 1) / kChunk;
      if (chunks == 0) continue;
      const int64_t first = a.partial(b, g, a.first_chunk(branch)) + h;
      float sum = 0;
      if (j < a.dv)
#pragma unroll 8
        for (int c = part; c < chunks; c += kParts) {
          const int64_t from = first + int64_t{c} * a.G;
          sum = fmaf(exp2f(a.partial_sum[from].x - maxes[branch]), a.partial_o[from * a.dv + j], sum);
        }
      sums[part][column] = sum;
      __syncthreads();
      if (part == 0) {
#pragma unroll
        for (int i = 1; i < kParts; ++i) sum += sums[i][column];
        const float o = to_float(from_float<T>(sum / totals[branch]));  // as the branch's own kernel rounds it
        out = dense ? o : fmaf(a.gate[(branch * gridDim.y + b) * a.Hkv + g], o, out);
      }
      __syncthreads();
    }
    if (part == 0 && j < a.dv) a.out[(int64_t{b} * a.Hq + head) * a.dv + j] = from_float<T>(out);
  }
}

template <class T, int V, int kHeads>
void launch_branches(Context& ctx, const Decode<T>& a, const GateMlp<T>& mlp, const GateKernelOptions& gate, bool dense,
                     int64_t B) {
  const unsigned groups = static_cast<unsigned>(a.Hkv), batch = static_cast<unsigned>(B);
  const int64_t branch_floats = std::max<int64_t>(ChunkMemory<kHeads, kBranchThreads>::floats(a.G, a.dk), 2 * a.dk);
  launch_behind(ctx, "nsa_decode branches", branches_kernel<T, V, kHeads>,
                 dim3(static_cast<unsigned>(a.chunks[0] + a.chunks[2] + (dense ? 0 : 1)), groups, batch),
                 dim3(kBranchThreads), static_cast<size_t>(4 * branch_floats), a, mlp, gate);
  if (dense || !a.run[1]) return;
  constexpr int64_t kMostShared = 227 * 1024;
  const int64_t bytes = 4 * round_up_to(static_cast<int>(ChunkMemory<kHeads, kSelectThreads>::floats(a.G, a.dk)), 4) +
                        static_cast<int64_t>(sizeof(SelectMemory)) +
                        4 * (a.all_blocks + int64_t{a.tile_blocks} * ceil_div(a.l_sel, a.d) + ceil_div(a.l, a.d));
  TRIAD_CHECK(bytes <= kMostShared, "nsa_decode: a cache of {} tokens has {} blocks, whose scores need {} of {} bytes",
              a.rows[1], a.all_blocks, bytes, kMostShared);
  launch_behind(ctx, "nsa_decode selected", selected_kernel<T, V, kHeads>,
                 dim3(static_cast<unsigned>(a.chunks[1]), groups, batch), dim3(kSelectThreads),
                 static_cast<size_t>(bytes), a);
}

template <class T>
void decode(Context& ctx, const Tensor& out, const DecodeIn& in, const GateWeights& gate, const NsaConfig& c,
            const DecodeProbe& probe) {
  const NsaCache& cache = in.cache;
  const bool dense = cache.dense();
  const int64_t B = in.q.size(0), Hkv = cache.k_win.size(2);
  Decode<T> a{};
  const Tensor *const k[] = {&cache.k_cmp, &cache.k_sel, &cache.k_win}, *const v[] = {&cache.v_cmp, &cache.v_sel,
                                                                                      &cache.v_win};
  bool vectors = true;
  for (int i = 0; i < 3; ++i) {
    a.run[i] = probe.run[i] && !(dense && i != 2);
    if (dense && i != 2) continue;
    a.k[i] = bthd<T>(ConstTensor(*k[i])), a.v[i] = bthd<T>(ConstTensor(*v[i]));
    a.rows[i] = static_cast<int>(k[i]->size(1));
    a.chunks[i] = static_cast<int>(
        ceil_div(i == 1 ? std::min(c.n_sel * c.l_sel, cache.k_sel.size(1) + c.l_sel) : a.rows[i], kChunk));
    vectors = vectors && has_vectors(*k[i], kVector<T>) && has_vectors(*v[i], kVector<T>);
  }
  a.q = bthd<T>(in.q);
  a.position = in.position.ptr<int32_t>();
  a.Hq = static_cast<int>(in.q.size(2)), a.Hkv = static_cast<int>(Hkv), a.G = a.Hq / a.Hkv;
  a.dk = static_cast<int>(in.q.size(3)), a.dv = static_cast<int>(cache.v_win.size(3));
  a.l = static_cast<int>(c.l), a.d = static_cast<int>(c.d), a.l_sel = static_cast<int>(c.l_sel);
  a.n_sel = static_cast<int>(c.n_sel), a.init_blocks = static_cast<int>(c.init_blocks);
  a.local_blocks = static_cast<int>(c.local_blocks);
  a.all_blocks = static_cast<int>(ceil_div(a.rows[1], a.l_sel));
  a.tile_blocks = static_cast<int>(std::clamp<int64_t>(kScoreTile * c.d / c.l_sel, 1, std::max(1, a.all_blocks)));
  a.scale_log2 = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(a.dk)));
  TRIAD_CHECK(dense || c.n_sel <= kMostSelected, "nsa_decode: lists of {} blocks, at most {} on a GPU", c.n_sel,
              kMostSelected);
  TRIAD_CHECK(a.G <= kMostHeads, "nsa_decode: {} heads a group, at most {} on a GPU", a.G, kMostHeads);

  Scratch::Scope scope(ctx.scratch);
  const int64_t chunks = a.chunks[0] + a.chunks[1] + a.chunks[2];
  const auto floats = [&](int64_t n, const char* name) {
    return reinterpret_cast<float*>(scope.alloc(DType::f32, Shape{n}, name).data);
  };
  a.scores = floats(B * a.Hq * a.rows[0], "scores");
  a.partial_o = floats(B * Hkv * chunks * a.G * a.dv, "sums of chunks");
  a.partial_sum = reinterpret_cast<float2*>(floats(B * Hkv * chunks * a.G * 2, "totals of chunks"));
  a.gate = floats(3 * B * Hkv, "gate");
  a.out = out.ptr<T>();
  TRIAD_CHECK(out.contiguous(), "nsa_decode: out {} has gaps", out.str());
  if (!probe.reads.empty()) a.reads = reinterpret_cast<unsigned long long*>(probe.reads.ptr<int64_t>());

  const GateMlp<T> mlp = dense ? GateMlp<T>{} : gate_mlp<T>(gate);
  const GateKernelOptions gate_options{static_cast<int>(c.gate.force), c.gate.uniform, c.gate.kind == GateKind::softmax,
                                       static_cast<float>(1.0 / c.gate.temperature)};
  if (!vectors)
    launch_branches<T, 1, 2>(ctx, a, mlp, gate_options, dense, B);
  else if (a.G <= 2)
    launch_branches<T, kVector<T>, 2>(ctx, a, mlp, gate_options, dense, B);
  else
    launch_branches<T, kVector<T>, 8>(ctx, a, mlp, gate_options, dense, B);
  launch_behind(ctx, "nsa_decode join", join_kernel<T>, dim3(static_cast<unsigned>(a.Hq), static_cast<unsigned>(B)),
                 dim3(kJoinThreads), 0, a, dense);
}

}  // namespace

void nsa_decode(Context& ctx, Tensor out, const DecodeIn& in, const GateWeights& gate, const NsaConfig& c,
                const DecodeProbe& probe) {
  dispatch_gpu_float(out.dtype, [&]<class T>() { decode<T>(ctx, out, in, gate, c, probe); });
}

}  // namespace triad::cuda
