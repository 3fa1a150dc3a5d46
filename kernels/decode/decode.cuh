// For the decoding attention kernels (overview: decode/decode.cu): call arguments, attention over a chunk of keys, and
// combining chunks (split-KV). NSA has three branches: compressed, selected and window, index 0, 1 and 2. Dense
// attention has one, index 0. One CTA processes one chunk for all of a group's query heads, so that each key is read
// once. For each head it writes the maximum score, the sum of exponentials and the weighted value sum.
#pragma once
#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/common/bthd.cuh"
#include "kernels/common/launch_pdl.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/decode/decode.h"

namespace triad::cuda {

inline constexpr int kColumns = 64;      // value columns processed at a time, two per lane
inline constexpr int kBranchChunk = 64;  // keys per CTA in the compressed and window branches, and in dense attention
inline constexpr int kSelectedChunk = 128;  // keys per CTA in the selected branch
inline constexpr int kBranchThreads = 256;
inline constexpr int kSelectThreads = 512;
inline constexpr int kCombineThreads = 512;
inline constexpr int kClusterCtas = 8;       // CTAs of a cluster, which share a (sequence, group)
inline constexpr int kWideClusterCtas = 16;  // the same for long caches
inline constexpr int kMaxSelected = 64;      // most blocks in a selected-block list (n_sel)
inline constexpr int kMaxHeads = 32;         // most query heads per group (G)

// The arguments that NSA and dense attention share. Arrays are indexed by branch.
template <class T, int kBranches_>
struct DecodeArgs {
  using Element = T;
  static constexpr int kBranches = kBranches_;
  Bthd<const T> q;
  Bthd<const T> k[kBranches], v[kBranches];
  const int32_t* position;  // [B] the new token's position
  int B, Hq, Hkv, G, dk, dv;
  int rows[kBranches];        // rows in each branch's cache; for the window, the ring's length
  int chunks[kBranches];      // each branch's chunk count if the cache is full
  bool run[kBranches];        // branches to compute
  float scale_log2;           // log2(e) / sqrt(dk), the factor for scores in base 2
  float* partial_o;           // [B,Hkv,all chunks,G,dv]: a chunk's sum of 2^(score - max) v
  float2* partial_sum;        // [B,Hkv,all chunks,G]: a chunk's maximum score and sum of 2^(score - max)
  T* out;                     // [B,Hq,dv]
  unsigned long long* reads;  // [kBranches]: key read counters, or null
};

// NSA's arguments.
template <class T>
struct Decode : DecodeArgs<T, 3> {
  const int32_t* lists;   // [B,Hkv,n_sel]: given lists; null: the compressed branch selects
  int32_t* shared_lists;  // [B,Hkv,n_sel]: the last selection, if tokens share lists; else null
  int l, d, l_sel, n_sel, init_blocks, local_blocks;
  int every;        // tokens that share a list
  int tile_blocks;  // blocks that the selection scores at a time
  float* scores;    // [B,Hq,rows[0]]: the compressed branch's scores, times log2(e)
  float* gate;      // [3,B,Hkv]: each branch's factor in the output
  uint64_t* best;   // [B,Hkv,CTAs of a cluster,n_sel]: best blocks in each CTA's share of the candidates

  static __host__ __device__ int chunk_of(int branch) { return branch == 1 ? kSelectedChunk : kBranchChunk; }
  // The lists that are there before the token at position `at` attends; null: the compressed branch selects.
  __device__ const int32_t* given_lists(int at) const {
    return lists == nullptr && at % every != 0 ? shared_lists : lists;
  }
  // How many keys in a branch the token at position `at` attends to.
  __device__ int keys(int branch, int at) const {
    if (branch == 2) return min(this->rows[2], at + 1);
    if (branch == 1) return (min(n_sel, at / l_sel + 1) - 1) * l_sel + at % l_sel + 1;
    return blocks_within(at + 1, l, d, this->rows[0]);
  }
  __device__ int first_chunk(int branch) const {  // chunks are stored in the order compressed, window, selected
    return branch == 0 ? 0 : branch == 2 ? this->chunks[0] : this->chunks[0] + this->chunks[2];
  }
  // Where a chunk's first head is in partial_sum; multiplied by dv, where it is in partial_o.
  __device__ int64_t partial(int b, int g, int branch, int chunk) const {
    const int all = this->chunks[0] + this->chunks[1] + this->chunks[2];
    return ((int64_t{b} * this->Hkv + g) * all + first_chunk(branch) + chunk) * this->G;
  }
  // Returns `out`, the sum over earlier branches, plus a branch's output o times its gate.
  __device__ float add_branch(float out, float o, int branch, int b, int g) const {
    return fmaf(gate[(branch * this->B + b) * this->Hkv + g], o, out);
  }
};

// Dense attention's arguments.
template <class T>
struct DenseDecode : DecodeArgs<T, 1> {
  int chunk_keys;  // keys per CTA

  __host__ __device__ int chunk_of(int) const { return chunk_keys; }
  __device__ int keys(int, int at) const { return min(this->rows[0], at + 1); }
  __device__ int64_t partial(int b, int g, int, int chunk) const {
    return ((int64_t{b} * this->Hkv + g) * this->chunks[0] + chunk) * this->G;
  }
  __device__ float add_branch(float, float o, int, int, int) const { return o; }
};

// Two adjacent elements of a value row in registers, as loaded.
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

// Shared memory for one chunk: the group's queries, padded to a multiple of kHeads heads; probabilities; each warp's
// sums.
template <int kHeads, int kThreads, int kChunk>
struct ChunkMemory {
  float *q, *p, *sums;
  int heads;  // the group's heads, padded to a multiple of kHeads
  __host__ __device__ static int floats(int G, int dk) {
    return round_up(G, kHeads) * (round_up(dk, 4) + kChunk) + kThreads / 32 * kHeads * kColumns;
  }
  __device__ ChunkMemory(float* memory, int G, int dk) : heads(round_up(G, kHeads)) {
    q = memory;
    p = q + heads * round_up(dk, 4);
    sums = p + heads * kChunk;
  }
};

template <int kHeads>
using BranchChunk = ChunkMemory<kHeads, kBranchThreads, kBranchChunk>;

// Loads the group's queries into shared memory, scaled by scale_log2, with zeros for padding heads. A barrier must
// follow.
template <class Args, int kHeads, int kThreads, int kChunk>
__device__ void load_queries(const Args& a, const ChunkMemory<kHeads, kThreads, kChunk>& memory, int b, int g) {
  const typename Args::Element* const q = a.q.row(b, 0, int64_t{g} * a.G);
  float* const to = memory.q;
  const int q_row = round_up(a.dk, 4);
#pragma unroll 1
  for (int h = threadIdx.x / 32; h < memory.heads; h += kThreads / 32)
#pragma unroll 1
    for (int j = threadIdx.x % 32; j < a.dk; j += 32)
      to[h * q_row + j] = h < a.G ? to_float(q[h * a.q.stride_h + j]) * a.scale_log2 : 0;
}

// One group's attention over a chunk of `count` keys; key i is row row_of(i) in the branch's cache. Writes the heads'
// partial sums and, if scores is not null, their scores to scores[head * scores_stride + i]. kQueries: whether to load
// the queries first.
template <bool kQueries, int V, class Args, int kHeads, int kThreads, int kChunk, class RowOf>
__device__ void attend_chunk(const Args& a, const ChunkMemory<kHeads, kThreads, kChunk>& memory, int branch, int chunk,
                             int b, int g, int count, RowOf&& row_of, float* scores, int64_t scores_stride) {
  using T = typename Args::Element;
  constexpr int kWarps = kThreads / 32, kLanes = kThreads / kChunk;  // lanes per key
  constexpr int kHeld = kChunk / kWarps;                             // keys per warp
  constexpr int kOfLane = kChunk / 32;                               // one head's scores per lane
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q_row = round_up(a.dk, 4);

  // The first two pieces of the lane's key and the first columns of its values are loaded before anything else.
  using Piece = std::conditional_t<(V > 1), uint4, T>;
  const int key = threadIdx.x / kLanes, part = threadIdx.x % kLanes;
  const T* const k_row = a.k[branch].row(b, row_of(min(key, count - 1)), g);
  const T* const values = a.v[branch].row(b, 0, g);
  const int64_t v_stride = a.v[branch].stride_t;
  Piece pieces_of_key[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (const int j = (part + kLanes * i) * V; j < a.dk) pieces_of_key[i] = *reinterpret_cast<const Piece*>(k_row + j);
  ValuePair<T, (V > 1)> held[kHeld];
  const auto load_values = [&](int j0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = warp + kWarps * i;
      held[i].load(values + row_of(min(at, count - 1)) * v_stride, at < count ? j0 + 2 * lane : a.dv, a.dv);
    }
  };
  load_values(0);
  if constexpr (kQueries) {
    load_queries(a, memory, b, g);
    __syncthreads();
  }

#pragma unroll 1
  for (int h0 = 0; h0 < a.G; h0 += kHeads) {
    float s[kHeads] = {};
#pragma unroll 1
    for (int j = part * V; j < a.dk; j += kLanes * V) {
      float x[V];
      if (j >= 2 * kLanes * V)
        load_vector<V>(x, k_row + j);
      else if constexpr (V > 1)
        as_floats<T>(x, j < kLanes * V ? pieces_of_key[0] : pieces_of_key[1]);
      else
        x[0] = to_float(j < kLanes ? pieces_of_key[0] : pieces_of_key[1]);
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
      s[h] = warp_sum<kLanes>(s[h]);
      if (part == 0) memory.p[key * memory.heads + h0 + h] = key < count ? s[h] : -INFINITY;
    }
  }
  __syncthreads();

  pdl_trigger();  // comes late, since the next kernel's weight loads would delay the key loads
  const int64_t partial = a.partial(b, g, branch, chunk);
#pragma unroll 1
  for (int h = warp; h < memory.heads; h += kWarps) {
    float* const score = memory.p + lane * memory.heads + h;  // scores for keys lane, lane + 32, ...
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const float s = score[i * 32 * memory.heads];
      if (scores != nullptr && h < a.G && lane + 32 * i < count) scores[h * scores_stride + lane + 32 * i] = s;
      max = fmaxf(max, s);
    }
    max = warp_max(max);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      float& s = score[i * 32 * memory.heads];
      sum += s = exp2_approx(s - max);
    }
    sum = warp_sum(sum);
    if (lane == 0 && h < a.G) a.partial_sum[partial + h] = make_float2(max, sum);
  }
  __syncthreads();

#pragma unroll 1
  for (int j0 = 0; j0 < a.dv; j0 += kColumns) {
    if (j0 > 0) load_values(j0);
#pragma unroll 1
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

template <int kBranches, int kThreads>
struct CombineMemory {
  static constexpr int kParts = kThreads / kColumns;
  float max[kBranches][kParts][kColumns], sum[kBranches][kParts][kColumns], o[kBranches][kParts][kColumns];
};

// Combines chunks into outputs [begin, end) among the G * dv for one (sequence, group): combines each branch's chunks,
// rounds as the forward pass does, and adds the branches times their gates. Threads are columns x parts. A part
// combines some chunks, relative to their maximum so far; then the parts are combined in order.
template <class Args, int kThreads>
__device__ void combine_chunks(const Args& a, CombineMemory<Args::kBranches, kThreads>& memory, int b, int g, int begin,
                               int end) {
  using T = typename Args::Element;
  constexpr int kParts = kThreads / kColumns, kAtOnce = 8;
  const int at = a.position[b], column = threadIdx.x % kColumns, part = threadIdx.x / kColumns;
#pragma unroll 1
  for (int i0 = begin; i0 < end; i0 += kColumns) {
    const int i = i0 + column, h = i / a.dv, j = i % a.dv;
#pragma unroll 1
    for (int branch = 0; branch < Args::kBranches; ++branch) {
      const int chunks = i < end ? ceil_div(a.keys(branch, at), a.chunk_of(branch)) : 0;
      const float2* const sums = a.partial_sum + a.partial(b, g, branch, 0) + h;
      const float* const outs = a.partial_o + (a.partial(b, g, branch, 0) + h) * a.dv + j;
      float max = -INFINITY, sum = 0, o = 0;
#pragma unroll 1
      for (int c0 = part; c0 < chunks; c0 += kParts * kAtOnce) {
        float2 chunk_sum[kAtOnce];
        float chunk_o[kAtOnce];
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const int64_t from = int64_t{min(c0 + u * kParts, chunks - 1)} * a.G;
          chunk_sum[u] = __ldcg(sums + from), chunk_o[u] = __ldcg(outs + from * a.dv);
        }
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          if (c0 + u * kParts >= chunks) break;
          const float new_max = fmaxf(max, chunk_sum[u].x);
          const float scale = exp2_approx(max - new_max), weight = exp2_approx(chunk_sum[u].x - new_max);
          sum = fmaf(chunk_sum[u].y, weight, sum * scale);
          o = fmaf(chunk_o[u], weight, o * scale);
          max = new_max;
        }
      }
      memory.max[branch][part][column] = max;
      memory.sum[branch][part][column] = sum;
      memory.o[branch][part][column] = o;
    }
    __syncthreads();
    if (part == 0 && i < end) {
      float out = 0;
#pragma unroll 1
      for (int branch = 0; branch < Args::kBranches; ++branch) {
        if (a.keys(branch, at) == 0) continue;
        float max = -INFINITY, sum = 0, o = 0;
#pragma unroll
        for (int p = 0; p < kParts; ++p) max = fmaxf(max, memory.max[branch][p][column]);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const float weight = exp2_approx(memory.max[branch][p][column] - max);
          sum = fmaf(memory.sum[branch][p][column], weight, sum);
          o = fmaf(memory.o[branch][p][column], weight, o);
        }
        o = to_float(from_float<T>(o / sum));
        out = a.add_branch(out, o, branch, b, g);
      }
      a.out[(int64_t{b} * a.Hq + g * a.G + h) * a.dv + j] = from_float<T>(out);
    }
    __syncthreads();
  }
}

// The combination alone, 64 outputs per CTA.
template <class Args>
__global__ void __launch_bounds__(kCombineThreads) decode_combine_kernel(Args a) {
  pdl_trigger();
  pdl_wait();
  __shared__ CombineMemory<Args::kBranches, kCombineThreads> memory;
  const int begin = static_cast<int>(blockIdx.x) * kColumns;
  combine_chunks(a, memory, blockIdx.z, blockIdx.y, begin, min(a.G * a.dv, begin + kColumns));
}
template <class Args>
void launch_combine(Context& ctx, const char* name, const Args& a) {
  launch_pdl(ctx, name, decode_combine_kernel<Args>,
             dim3(static_cast<unsigned>(ceil_div(a.G * a.dv, kColumns)), static_cast<unsigned>(a.Hkv),
                  static_cast<unsigned>(a.B)),
             dim3(kCombineThreads), 0, a);
}

// Calls f.template operator()<V, kHeads>() with the vector length and the heads at a time that suit the rows and the
// group.
template <class T, class F>
void dispatch_chunks(int G, bool vectors, F&& f) {
  if (!vectors) return f.template operator()<1, 2>();
  G <= 2 ? f.template operator()<kVector<T>, 2>() : f.template operator()<kVector<T>, 8>();
}

// ---- call arguments, on the host ----

// The arguments that do not depend on the branches. k, v: keys and values in any branch's cache, for their sizes.
template <class Args>
Args decode_args(const Tensor& out, const ConstTensor& q, const ConstTensor& position, const Tensor& k,
                 const Tensor& v) {
  using T = typename Args::Element;
  TRIAD_CHECK(out.contiguous(), "decode: out {} has gaps", out.str());
  Args a{};
  a.q = bthd<T>(q);
  a.out = out.ptr<T>();
  a.position = position.ptr<int32_t>();
  a.B = static_cast<int>(q.size(0)), a.Hq = static_cast<int>(q.size(2)), a.Hkv = static_cast<int>(k.size(2));
  a.G = a.Hq / a.Hkv;
  a.dk = static_cast<int>(q.size(3)), a.dv = static_cast<int>(v.size(3));
  a.scale_log2 = static_cast<float>(std::numbers::log2e / std::sqrt(static_cast<double>(a.dk)));
  TRIAD_CHECK(a.G <= kMaxHeads, "decode: {} heads a group, at most {} on a GPU", a.G, kMaxHeads);
  return a;
}

// Sets a branch's keys and values; a token attends to at most `most`. Returns whether the rows consist of aligned
// 16-byte vectors.
template <class Args>
bool set_branch(Args& a, int branch, const Tensor& k, const Tensor& v, int64_t most, bool run) {
  using T = typename Args::Element;
  a.k[branch] = bthd<T>(ConstTensor(k)), a.v[branch] = bthd<T>(ConstTensor(v));
  a.rows[branch] = static_cast<int>(k.size(1));
  a.chunks[branch] = static_cast<int>(ceil_div(most, a.chunk_of(branch)));
  a.run[branch] = run;
  return has_vectors(k, kVector<T>) && has_vectors(v, kVector<T>);
}

// How many blocks, at most `most`, the selection scores at a time (a tile): they have about kScoreTile compressed keys.
inline int tile_blocks(int64_t l_sel, int64_t d, int64_t most) {
  constexpr int64_t kScoreTile = 4096;
  return static_cast<int>(std::clamp<int64_t>(kScoreTile * d / l_sel, 1, most));
}

inline float* alloc_floats(Scratch::Scope& scope, int64_t n, const char* name) {
  return reinterpret_cast<float*>(scope.alloc(DType::f32, Shape{n}, name).data);
}

// Allocates all chunks' partial results. Call it once the chunk counts are known.
template <class Args>
void alloc_partials(Scratch::Scope& scope, Args& a) {
  int64_t heads = 0;
  for (const int chunks : a.chunks) heads += int64_t{a.B} * a.Hkv * chunks * a.G;
  a.partial_o = alloc_floats(scope, heads * a.dv, "sums of chunks");
  a.partial_sum = reinterpret_cast<float2*>(alloc_floats(scope, heads * 2, "totals of chunks"));
}

// Launches the selection, the selected branch and the combination (decode/decode_selected.cu).
template <class T>
void launch_selected(Context&, const Decode<T>&, bool vectors);

}  // namespace triad::cuda
