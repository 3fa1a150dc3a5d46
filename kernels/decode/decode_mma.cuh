// Attention of a group's query heads over keys and values in bf16, on tensor cores, for the decoding kernels. A product
// has 16 heads (zero rows if a group has fewer) and 16 keys, a tile. Each warp of a CTA independently processes some
// tiles. Keys and values are loaded directly into the MMA operands' registers: the next keys during the softmax of the
// current ones, the next values after the current ones have been used. Element order along k does not matter as long as
// keys and queries share it; value column order does not matter as long as the sums are stored in that order. So a lane
// loads whole 16-byte vectors.
//
// Probabilities are rounded to bf16 for their product with the values, as in the forward pass; their sum is not
// rounded.
#pragma once
#include "kernels/decode/decode.cuh"

namespace triad::cuda {

inline constexpr int kTileKeys = 16;   // keys that a warp processes at a time
inline constexpr int kTileHeads = 16;  // heads per product: the most that a group may have

// Shared memory where the warps' results are combined: each head's maximum, exponential sum and value sum.
template <int kWarps, int kDv>
struct WarpSums {
  float max[kWarps][kTileHeads], sum[kWarps][kTileHeads];
  float o[kWarps][1][kDv];  // [warp][head][kDv]; the memory has G heads
  __host__ __device__ static int bytes(int G) {
    return static_cast<int>(sizeof(WarpSums)) + static_cast<int>(sizeof(float)) * kWarps * (G - 1) * kDv;
  }

  struct Total {
    float max, sum, o;
  };
  // Adds the warps' results for output i = head * kDv + column.
  __device__ Total total(int G, int i) const {
    const int head = i / kDv;
    const float* const sums = o[0][0] + i;
    Total all = {-INFINITY, 0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all.max = fmaxf(all.max, max[w][head]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2_approx(max[w][head] - all.max);
      all.sum = fmaf(sum[w][head], weight, all.sum);
      all.o = fmaf(sums[w * G * kDv], weight, all.o);
    }
    return all;
  }
};

// A warp's queries, and its running softmax for heads lane / 4 and + 8. In every 64 columns a lane accumulates the 16
// columns 16 (lane % 4) + i.
template <int kDk, int kDv>
struct TileAttention {
  static constexpr int kSteps =
      kDk / 32;  // key vectors per lane: elements 8 (lane % 4) ... + 8, the next 32 further on
  static constexpr int kBlocks = kDv / 64;  // 64-column value blocks; a lane has elements 8 (lane / 4) ... + 8 in each
  using bf16 = __nv_bfloat16;
  uint4 q[2][kSteps];
  float max[2], sum[2], o[kBlocks * 8][4];

  __device__ void load_queries(const bf16* rows, int64_t stride, int G) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int head = lane / 4 + 8 * half;
        q[half][s] = head < G ? *reinterpret_cast<const uint4*>(rows + head * stride + lane % 4 * 8 + 32 * s)
                              : make_uint4(0, 0, 0, 0);
      }
  }

  // Attention over this warp's tiles among `count` keys: those that begin at first + i * step. Key i in the tile that
  // begins at key `at` is row row_of(at, i) behind k and v. keep(head, key, score) gets each score.
  template <class RowOf, class Keep>
  __device__ void attend(const bf16* k, int64_t k_stride, const bf16* v, int64_t v_stride, int first, int step,
                         int count, float scale_log2, RowOf&& row_of, Keep&& keep) {
    const int lane = threadIdx.x % 32;
    const bf16* const k_rows = k + lane % 4 * 8;
    const bf16* const v_rows = v + lane / 4 * 8;
    uint4 keys[2][kSteps], values[4][kBlocks];
    const auto load_keys = [&](int at) {  // loads keys at + lane / 4 and + 8
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bf16* const row = k_rows + row_of(at, min(at + lane / 4 + 8 * half, count - 1)) * k_stride;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) keys[half][s] = *reinterpret_cast<const uint4*>(row + 32 * s);
      }
    };
    const auto load_values = [&](int at) {  // loads the values for keys at + 2 (lane % 4), + 1, + 8, + 9
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bf16* const row = v_rows + row_of(at, min(at + lane % 4 * 2 + i % 2 + i / 2 * 8, count - 1)) * v_stride;
#pragma unroll
        for (int c = 0; c < kBlocks; ++c) values[i][c] = *reinterpret_cast<const uint4*>(row + 64 * c);
      }
    };

    max[0] = max[1] = -INFINITY, sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < kBlocks * 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] = 0;
    int at = first;
    if (at < count) load_keys(at), load_values(at);
#pragma unroll 1
    for (; at < count; at += step) {
      float score[2][4] = {};  // keys 8 half + 2 (lane % 4), + 1 for head lane / 4, then for head lane / 4 + 8
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const uint4 q0 = q[0][s], q1 = q[1][s], key = keys[half][s];
          mma_m16n8k16(score[half], {q0.x, q1.x, q0.y, q1.y}, key.x, key.y);
          mma_m16n8k16(score[half], {q0.z, q1.z, q0.w, q1.w}, key.z, key.w);
        }
      if (at + step < count) load_keys(at + step);
      uint32_t p[2][2];  // probabilities: [keys 0 to 7, 8 to 15][the lane's first, second head]
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float tile_max = -INFINITY;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& s = score[half][2 * h + i];
            const int key = at + 8 * half + lane % 4 * 2 + i;
            s = key < count ? s * scale_log2 : -INFINITY;
            if (key < count) keep(lane / 4 + 8 * h, key, s);
            tile_max = fmaxf(tile_max, s);
          }
        tile_max = warp_max<4>(tile_max);
        const float new_max = fmaxf(max[h], tile_max), scale = exp2_approx(max[h] - new_max);
        max[h] = new_max, sum[h] *= scale;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float p0 = exp2_approx(score[half][2 * h] - new_max),
                      p1 = exp2_approx(score[half][2 * h + 1] - new_max);
          sum[h] += p0 + p1;
          p[half][h] = pack_bf16(p0, p1);
        }
#pragma unroll
        for (int i = 0; i < kBlocks * 8; ++i) o[i][2 * h] *= scale, o[i][2 * h + 1] *= scale;
      }
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        const auto words = [&](int key, int i) {  // two adjacent columns in one key
          const uint4& x = values[key][c];
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
      if (at + step < count) load_values(at + step);
    }
  }

  // Writes the warp's results. A barrier must follow.
  template <int kWarps>
  __device__ void store(WarpSums<kWarps, kDv>& memory, int G) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* const sums = memory.o[0][0];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = quad_sum(sum[h]);
      const int head = lane / 4 + 8 * h;
      if (lane % 4 == 0) memory.max[warp][head] = max[h], memory.sum[warp][head] = sum[h];
      if (head >= G) continue;
#pragma unroll
      for (int c = 0; c < kBlocks; ++c)
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
          const int e = 2 * h + i / 8, tile = c * 8 + i % 8;
          *reinterpret_cast<float4*>(sums + (warp * G + head) * kDv + 64 * c + lane % 4 * 16 + i) =
              make_float4(o[tile][e], o[tile + 1][e], o[tile + 2][e], o[tile + 3][e]);
        }
    }
  }
};

// The cache rows of the tokens in listed blocks, numbered as consecutive keys. A tile reaches into at most two blocks,
// so the blocks have kTileKeys tokens or more.
struct ListedRows {
  const int32_t* list;
  int l_sel;
  // The row of key i in the tile that begins at key `tile`.
  __device__ int operator()(int tile, int i) const {
    const int block = tile / l_sel, offset = i - block * l_sel;
    return offset < l_sel ? list[block] * l_sel + offset : (list[block + 1] - 1) * l_sel + offset;
  }
};

// ---- spans: long chunks of the only branch, one per CTA ----

inline constexpr int kSpanThreads = 256, kSpanWarps = kSpanThreads / 32;
inline constexpr int kSpanRound = kSpanWarps * kTileKeys;  // keys that a CTA processes at a time
inline constexpr int kManySpans = 8;                       // most spans per (sequence, group) for many sequences

// Whether attend_span() supports the shape.
template <class Args>
bool has_spans(const Args& a, bool vectors) {
  return vectors && a.G <= kTileHeads && ((a.dk == 64 && a.dv == 64) || (a.dk == 128 && a.dv == 128));
}
// Sets the chunks to spans: at most `spans` if the token attends to at most `most` keys.
template <class Args>
void set_spans(Args& a, int most, int spans) {
  a.chunk_keys = round_up(ceil_div(most, spans), kSpanRound);
  a.chunks[0] = ceil_div(most, a.chunk_keys);
}

// Attention over the span blockIdx.x, the `count` keys behind key `first`: key i of the span is row row_of(tile, i), in
// the tile that begins at key `tile` of the span. Writes a chunk's partial sums.
template <int kDk, int kDv, class Args, class RowOf>
__device__ void attend_span(const Args& a, int count, RowOf&& row_of) {
  const int g = blockIdx.y, b = blockIdx.z;
  TileAttention<kDk, kDv> attention;
  attention.load_queries(a.q.row(b, 0, int64_t{g} * a.G), a.q.stride_h, a.G);
  attention.attend(a.k[0].row(b, 0, g), a.k[0].stride_t, a.v[0].row(b, 0, g), a.v[0].stride_t,
                   static_cast<int>(threadIdx.x) / 32 * kTileKeys, kSpanRound, count, a.scale_log2, row_of,
                   [](int, int, float) {});
  pdl_trigger();

  auto& memory = *reinterpret_cast<WarpSums<kSpanWarps, kDv>*>(dynamic_shared());
  attention.store(memory, a.G);
  __syncthreads();
  const int64_t partial = a.partial(b, g, 0, blockIdx.x);
#pragma unroll 1
  for (int i = threadIdx.x; i < a.G * kDv; i += kSpanThreads) {
    const auto total = memory.total(a.G, i);
    a.partial_o[partial * kDv + i] = total.o;
    if (i % kDv == 0) a.partial_sum[partial + i / kDv] = make_float2(total.max, total.sum);
  }
  if (threadIdx.x == 0 && a.reads != nullptr) atomicAdd(a.reads, static_cast<unsigned long long>(count));
}

// Launches a kernel that calls attend_span().
template <int kDv, class Args>
void launch_spans(Context& ctx, const char* name, void (*kernel)(Args), const Args& a) {
  launch_pdl(ctx, name, kernel,
             dim3(static_cast<unsigned>(a.chunks[0]), static_cast<unsigned>(a.Hkv), static_cast<unsigned>(a.B)),
             dim3(kSpanThreads), static_cast<size_t>(WarpSums<kSpanWarps, kDv>::bytes(a.G)), a);
}

}  // namespace triad::cuda
