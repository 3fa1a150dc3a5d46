// One warp's matrix products on tiles in shared memory, and tile loads. A warp computes 16 rows. Products use tensor
// cores for bf16 and fp32 FMAs for float. For both, the sums c[N/8][4] have mma.m16n8k16's register layout, so that
// code between two products serves both:
//   a lane holds row lane/4 (e = 0, 1) and row lane/4 + 8 (e = 2, 3) at columns 8*j + 2*(lane%4) + e%2 in c[j][e].
// Tile rows are padded by 16 bytes, so that eight consecutive rows have the same 16-byte column in different banks.
#pragma once
#include "kernels/common/launch.cuh"
#include "kernels/common/ptx.cuh"

namespace triad::cuda {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;  // warps and threads in most CTAs that use these tiles
inline constexpr int kDepth = 64;                         // inner dimensions are zero-padded to a multiple of this

template <class T>
constexpr int tile_stride(int width) {
  return width + static_cast<int>(16 / sizeof(T));
}

__device__ __forceinline__ int fragment_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int fragment_column() { return threadIdx.x % 4 * 2; }

// Transposes a 4 x 4 word matrix across four neighbouring lanes: lane c gets word c from each lane. All of the warp's
// lanes call it.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int by = 1; by < 4; by *= 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t &low = w[by == 1 ? 2 * i : i], &high = w[by == 1 ? 2 * i + 1 : i + 2];
      const uint32_t got = __shfl_xor_sync(kFullWarp, (c & by) != 0 ? low : high, by);
      if ((c & by) != 0)
        low = got;
      else
        high = got;
    }
}

// A [B, rows, heads, width] tensor for device code; strides in elements, innermost stride 1.
template <class T>
struct View {
  T* data;
  int64_t batch, row, head;
  int width;
  bool vector;  // every row is 16-byte aligned
  __device__ __forceinline__ T* at(int64_t b, int64_t r, int64_t h) const {
    return data + b * batch + r * row + h * head;
  }
  __device__ __forceinline__ View columns(int begin, int count) const {
    return {data + begin, batch, row, head, max(0, min(count, width - begin)), vector};
  }
};

// Loads kRows view rows into a tile, by all of the CTA's kCtaThreads threads. source(r) returns row r's first element,
// or nullptr for a zero row. Columns from the view's width up to `padded` become zeros. Asynchronous (cp.async) if the
// view's rows are aligned.
template <int kRows, int kCtaThreads = kThreads, class T, class Source>
__device__ __forceinline__ void load_rows(T* tile, int stride, int padded, const View<const T>& view, Source source) {
  if (view.vector) {
    constexpr int kCopy = 16 / sizeof(T), kLanes = 8;  // 8 lanes copy 128 bytes per row
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < kRows * kLanes / kCtaThreads; ++i) {
      const int r = threadIdx.x / kLanes + i * (kCtaThreads / kLanes);
      const T* from = source(r);
      for (int c = lane * kCopy; c < padded; c += kLanes * kCopy) {
        const int valid = from == nullptr ? 0 : max(0, min(kCopy, view.width - c));
        copy_async_16(tile + r * stride + c, valid > 0 ? from + c : view.data, valid * static_cast<int>(sizeof(T)));
      }
    }
  } else {
    for (int r = threadIdx.x / 32; r < kRows; r += kCtaThreads / 32) {
      const T* from = source(r);
      for (int c = threadIdx.x % 32; c < padded; c += 32)
        tile[r * stride + c] = from != nullptr && c < view.width ? from[c] : from_float<T>(0.0f);
    }
  }
}

// Stores two adjacent columns in an output row. room: how many columns exist from `to` on; may be 0 or negative.
__device__ __forceinline__ void store_pair(float* to, int room, float x, float y) {
  if (room >= 2 && reinterpret_cast<uintptr_t>(to) % sizeof(float2) == 0) {
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
  } else {
    if (room >= 1) to[0] = x;
    if (room >= 2) to[1] = y;
  }
}
__device__ __forceinline__ void store_pair(__nv_bfloat16* to, int room, float x, float y) {
  if (room >= 2 && reinterpret_cast<uintptr_t>(to) % sizeof(uint32_t) == 0) {
    *reinterpret_cast<uint32_t*>(to) = pack_bf16(x, y);
  } else {
    if (room >= 1) to[0] = __float2bfloat16_rn(x);
    if (room >= 2) to[1] = __float2bfloat16_rn(y);
  }
}

// c[16 x kN] += a b^T, summed over `depth` columns (a multiple of kDepth). a: a 16-row tile; b: a kN-row tile; stride:
// elements per row in both.
template <int kN>
__device__ __forceinline__ void multiply_nt(float (&c)[kN / 8][4], const __nv_bfloat16* a, const __nv_bfloat16* b,
                                            int stride, int depth) {
  const int lane = threadIdx.x % 32;
  const __nv_bfloat16* a_row = a + lane % 16 * stride + lane / 16 * 8;
  const __nv_bfloat16* b_row = b + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
  for (int k0 = 0; k0 < depth; k0 += kDepth) {
#pragma unroll
    for (int k1 = 0; k1 < kDepth; k1 += 16) {
      const int k = k0 + k1;
      uint32_t a_fragment[4];
      load_matrices(a_fragment, a_row + k);
#pragma unroll
      for (int j = 0; j < kN / 8; j += 2) {
        uint32_t b_fragment[4];
        load_matrices(b_fragment, b_row + 8 * j * stride + k);
        mma_m16n8k16(c[j], a_fragment, b_fragment[0], b_fragment[1]);
        mma_m16n8k16(c[j + 1], a_fragment, b_fragment[2], b_fragment[3]);
      }
    }
  }
}
// Loads 16 tile rows, kDepth columns each, into registers as multiply_nt()'s left operand.
__device__ __forceinline__ void load_left_operand(uint32_t (&a)[kDepth / 16][4], const __nv_bfloat16* tile,
                                                  int stride) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) load_matrices(a[k], tile + lane % 16 * stride + lane / 16 * 8 + 16 * k);
}
// c[16 x kN] += a b^T, summed over kDepth columns. a is in registers, from load_left_operand().
template <int kN>
__device__ __forceinline__ void multiply_nt(float (&c)[kN / 8][4], const uint32_t (&a)[kDepth / 16][4],
                                            const __nv_bfloat16* b, int stride) {
  const int lane = threadIdx.x % 32;
  const __nv_bfloat16* b_row = b + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k)
#pragma unroll
    for (int j = 0; j < kN / 8; j += 2) {
      uint32_t b_fragment[4];
      load_matrices(b_fragment, b_row + 8 * j * stride + 16 * k);
      mma_m16n8k16(c[j], a[k], b_fragment[0], b_fragment[1]);
      mma_m16n8k16(c[j + 1], a[k], b_fragment[2], b_fragment[3]);
    }
}
template <int kN>
__device__ __forceinline__ void multiply_nt(float (&c)[kN / 8][4], const float* a, const float* b, int stride,
                                            int depth) {
  const float* a_row = a + fragment_row() * stride;
  const float* b_row = b + fragment_column() * stride;
  for (int k = 0; k < depth; k += 4) {
    const float4 a0 = *reinterpret_cast<const float4*>(a_row + k);
    const float4 a1 = *reinterpret_cast<const float4*>(a_row + 8 * stride + k);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 x = *reinterpret_cast<const float4*>(b_row + (8 * j + e) * stride + k);
        c[j][e] = fmaf(a0.x, x.x, fmaf(a0.y, x.y, fmaf(a0.z, x.z, fmaf(a0.w, x.w, c[j][e]))));
        c[j][e + 2] = fmaf(a1.x, x.x, fmaf(a1.y, x.y, fmaf(a1.z, x.z, fmaf(a1.w, x.w, c[j][e + 2]))));
      }
  }
}

// c[16 x kN] += a b. a [16 x kK] is in registers, laid out as a product's sums, and is rounded to bf16 for bf16. b: a
// kK-row tile.
template <int kK, int kN>
__device__ __forceinline__ void multiply_nn(float (&c)[kN / 8][4], const float (&a)[kK / 8][4], const __nv_bfloat16* b,
                                            int stride) {
  const int lane = threadIdx.x % 32;
  const __nv_bfloat16* b_row = b + lane % 16 * stride + lane / 16 * 8;
#pragma unroll
  for (int i = 0; i < kK / 8; i += 2) {  // two 8-column groups form the A operand for one step of 16
    const uint32_t a_fragment[4] = {pack_bf16(a[i][0], a[i][1]), pack_bf16(a[i][2], a[i][3]),
                                    pack_bf16(a[i + 1][0], a[i + 1][1]), pack_bf16(a[i + 1][2], a[i + 1][3])};
#pragma unroll
    for (int j = 0; j < kN / 8; j += 2) {
      uint32_t b_fragment[4];
      load_matrices_transposed(b_fragment, b_row + 8 * i * stride + 8 * j);
      mma_m16n8k16(c[j], a_fragment, b_fragment[0], b_fragment[1]);
      mma_m16n8k16(c[j + 1], a_fragment, b_fragment[2], b_fragment[3]);
    }
  }
}
template <int kK, int kN>
__device__ __forceinline__ void multiply_nn(float (&c)[kN / 8][4], const float (&a)[kK / 8][4], const float* b,
                                            int stride) {
  const int quad = threadIdx.x % 32 & ~3;
  const float* b_row = b + fragment_column();
#pragma unroll
  for (int k = 0; k < kK; ++k) {  // column k is in lane k%8/2 among the four that share a row
    const float a0 = __shfl_sync(kFullWarp, a[k / 8][k % 2], quad + k % 8 / 2);
    const float a1 = __shfl_sync(kFullWarp, a[k / 8][k % 2 + 2], quad + k % 8 / 2);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(b_row + k * stride + 8 * j);
      c[j][0] = fmaf(a0, x.x, c[j][0]);
      c[j][1] = fmaf(a0, x.y, c[j][1]);
      c[j][2] = fmaf(a1, x.x, c[j][2]);
      c[j][3] = fmaf(a1, x.y, c[j][3]);
    }
  }
}

// Software pipeline over tiles. For every tile that next(tile) returns, load(tile, stage) starts its copy to shared
// memory, and compute(tile, stage) runs when the copy is complete. With two stages, tile i + 1 is loaded while tile i
// is computed. next() must return the same tiles in all of the CTA's threads.
template <class Tile, class Next, class Load, class Compute>
__device__ __forceinline__ void pipeline(int stages, Next next, Load load, Compute compute) {
  Tile tile;
  bool more = next(tile);
  if (more) load(tile, 0);
  for (int stage = 0; more;) {
    const Tile current = tile;
    const int ahead = stage ^ (stages - 1);
    more = next(tile);
    copy_async_wait();
    __syncthreads();  // the tile is complete, and all warps have finished the previous one
    if (stages == 2 && more) load(tile, ahead);
    compute(current, stage);
    if (stages == 1 && more) {
      __syncthreads();
      load(tile, 0);
    }
    stage = ahead;
  }
}

}  // namespace triad::cuda
