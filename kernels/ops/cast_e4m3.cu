// Casts from bf16 to e4m3 with a scale for each row, on the GPU.
//
// cast_rows is bound by memory: 3 bytes an element. A CTA has a row. Its threads hold the row's 16-byte vectors in
// registers while they find its largest element, so the row is read once; rows of more than 32,768 elements, and rows
// without 16-byte alignment, are read twice.
//
// cast_weight needs the largest element of every row and every column before the first byte: one kernel finds them, by
// atomic maxima of the floats' bits (which no order changes), a second one casts tiles of 64x64 and transposes them in
// shared memory. 2 + 2 bytes read and 2 written an element.
//
// Multiplying by 1 / scale is exact, and cvt.rn.satfinite rounds as to_e4m3() does.
#include <cuda_fp8.h>

#include "kernels/common/bthd.cuh"
#include "kernels/ops/cast_e4m3.h"

namespace triad::cuda {
namespace {

constexpr int kVectorWidth = kVector<__nv_bfloat16>;  // elements

__device__ __forceinline__ uint32_t size_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Two values that were multiplied by 1 / scale, as e4m3 bytes. nan: the row is NaN.
__device__ __forceinline__ uint32_t two_bytes(float low, float high, bool nan) {
  if (nan) return kE4m3Nan << 8 | kE4m3Nan;
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint32_t largest_of(const uint4& vector) {
  float x[kVectorWidth];
  as_floats<__nv_bfloat16>(x, vector);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVectorWidth; ++i) largest = max(largest, size_bits(x[i]));
  return largest;
}

// A vector's eight bytes by one scale.
__device__ __forceinline__ uint2 bytes_of(const uint4& vector, float inverse, bool nan) {
  float x[kVectorWidth];
  as_floats<__nv_bfloat16>(x, vector);
  const auto four = [&](int i) {
    return two_bytes(x[i] * inverse, x[i + 1] * inverse, nan) | two_bytes(x[i + 2] * inverse, x[i + 3] * inverse, nan)
                                                                    << 16;
  };
  return {four(0), four(4)};
}

__device__ __forceinline__ uint32_t warp_largest(uint32_t x) { return __reduce_max_sync(kFullWarp, x); }

// The largest value in the CTA, in every thread.
__device__ __forceinline__ uint32_t block_largest(uint32_t x) {
  __shared__ uint32_t of_warp[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_largest(x);
  if (lane == 0) of_warp[warp] = x;
  __syncthreads();
  return warp_largest(lane < warps ? of_warp[lane] : 0);
}

// kHeld: the vectors of a row that each thread holds.
template <int kHeld>
__global__ void __launch_bounds__(512)
    cast_rows_e4m3_kernel(uint8_t* __restrict__ q, float* __restrict__ scale, const __nv_bfloat16* __restrict__ x,
                          int64_t stride, int64_t K) {
  const int64_t row = blockIdx.x;
  const int vectors = static_cast<int>(K / kVectorWidth);
  const uint4* const from = reinterpret_cast<const uint4*>(x + row * stride);
  uint4 held[kHeld];
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    held[k] = i < vectors ? from[i] : uint4{};
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) largest = max(largest, largest_of(held[k]));
  largest = block_largest(largest);
  const uint32_t bits = e4m3_scale_bits(largest);
  const bool nan = bits > 0x7f800000u;
  const float inverse = __uint_as_float(e4m3_inverse_bits(bits));
  if (threadIdx.x == 0) scale[row] = __uint_as_float(bits);
  uint2* const to = reinterpret_cast<uint2*>(q + row * K);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i < vectors) to[i] = bytes_of(held[k], inverse, nan);
  }
}

// Any row length and alignment.
__global__ void __launch_bounds__(512)
    cast_any_rows_e4m3_kernel(uint8_t* __restrict__ q, float* __restrict__ scale, const __nv_bfloat16* __restrict__ x,
                              int64_t stride, int64_t K) {
  const int64_t row = blockIdx.x;
  const __nv_bfloat16* const from = x + row * stride;
  uint32_t largest = 0;
  for (int64_t i = threadIdx.x; i < K; i += blockDim.x) largest = max(largest, size_bits(to_float(from[i])));
  largest = block_largest(largest);
  const uint32_t bits = e4m3_scale_bits(largest);
  const bool nan = bits > 0x7f800000u;
  const float inverse = __uint_as_float(e4m3_inverse_bits(bits));
  if (threadIdx.x == 0) scale[row] = __uint_as_float(bits);
  for (int64_t i = threadIdx.x; i < K; i += blockDim.x)
    q[row * K + i] = static_cast<uint8_t>(two_bytes(to_float(from[i]) * inverse, 0.0f, nan));
}

// Adds a tile of 64 rows and 256 columns to the maxima of rows and columns.
constexpr int kMaximaRows = 64, kMaximaColumns = 256, kMaximaWarps = 8;
__global__ void __launch_bounds__(32 * kMaximaWarps)
    weight_maxima_kernel(uint32_t* __restrict__ of_row, uint32_t* __restrict__ of_column,
                         const __nv_bfloat16* __restrict__ w, int M, int K) {
  __shared__ uint32_t columns[kMaximaColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * kMaximaColumns + lane * kVectorWidth, first = blockIdx.y * kMaximaRows;
  columns[threadIdx.x] = 0;
  __syncthreads();
  uint32_t mine[kVectorWidth] = {};
  for (int row = first + warp; row < min(first + kMaximaRows, M); row += kMaximaWarps) {
    uint32_t largest = 0;
    if (column < K) {
      float x[kVectorWidth];
      as_floats<__nv_bfloat16>(x, *reinterpret_cast<const uint4*>(w + int64_t{row} * K + column));
#pragma unroll
      for (int i = 0; i < kVectorWidth; ++i) {
        mine[i] = max(mine[i], size_bits(x[i]));
        largest = max(largest, size_bits(x[i]));
      }
    }
    largest = warp_largest(largest);
    if (lane == 0) atomicMax(of_row + row, largest);
  }
#pragma unroll
  for (int i = 0; i < kVectorWidth; ++i) atomicMax(columns + lane * kVectorWidth + i, mine[i]);
  __syncthreads();
  const int its = blockIdx.x * kMaximaColumns + threadIdx.x;
  if (its < K) atomicMax(of_column + its, columns[threadIdx.x]);
}

// A matrix's bytes and scales, and the bits of each row's largest element.
struct Cast {
  uint8_t* q;
  float* scale;
  const uint32_t* largest;
};

constexpr int kTile = 64, kTilePitch = kTile + 16;  // bytes; rows stay aligned to 16
__global__ void __launch_bounds__(256)
    cast_weight_e4m3_kernel(const Cast rows, const Cast columns, const __nv_bfloat16* __restrict__ w, int M, int K) {
  __shared__ alignas(16) uint8_t tile[kTile][kTilePitch];  // [column][row]
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  constexpr int kVectors = kTile / kVectorWidth, kPerThread = kTile * kVectors / 256;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * 256, r = i / kVectors, c = i % kVectors * kVectorWidth;
    const int row = first_row + r, column = first_column + c;
    if (row >= M || column >= K) continue;
    const int64_t at = int64_t{row} * K + column;
    const uint4 vector = *reinterpret_cast<const uint4*>(w + at);
    const uint32_t bits = e4m3_scale_bits(rows.largest[row]);
    if (column == 0) rows.scale[row] = __uint_as_float(bits);
    *reinterpret_cast<uint2*>(rows.q + at) =
        bytes_of(vector, __uint_as_float(e4m3_inverse_bits(bits)), bits > 0x7f800000u);
    float x[kVectorWidth];
    as_floats<__nv_bfloat16>(x, vector);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) {
      const uint32_t its = e4m3_scale_bits(columns.largest[column + j]);
      if (row == 0) columns.scale[column + j] = __uint_as_float(its);
      const float value = x[j] * __uint_as_float(e4m3_inverse_bits(its));
      tile[c + j][r] = static_cast<uint8_t>(two_bytes(value, 0.0f, its > 0x7f800000u));
    }
  }
  __syncthreads();
  const int c = threadIdx.x / (kTile / 16), r = threadIdx.x % (kTile / 16) * 16;
  const int row = first_row + r, column = first_column + c;
  if (row < M && column < K)
    *reinterpret_cast<uint4*>(columns.q + int64_t{column} * M + row) = *reinterpret_cast<const uint4*>(&tile[c][r]);
}

}  // namespace

void cast_rows_e4m3(Context& ctx, const E4m3Rows& rows, const ConstTensor& x) {
  constexpr int kMostThreads = 512, kMostHeld = 8;
  const int64_t N = x.size(0), K = x.size(1), vectors = K / kVectorWidth;
  const dim3 grid(static_cast<unsigned>(N));
  const auto run = [&](auto kernel, int64_t threads) {
    launch(ctx, "cast_rows_e4m3", kernel, grid, dim3(static_cast<unsigned>(ceil_div(threads, 32) * 32)), 0,
           rows.q.ptr<uint8_t>(), rows.scale.ptr<float>(), x.ptr<__nv_bfloat16>(), x.stride[0], K);
  };
  if (K == 0 || !has_vectors(x, kVectorWidth) || vectors > kMostThreads * kMostHeld)
    return run(cast_any_rows_e4m3_kernel, std::clamp<int64_t>(K, 32, kMostThreads));
  if (vectors <= kMostThreads) return run(cast_rows_e4m3_kernel<1>, vectors);
  if (vectors <= 2 * kMostThreads) return run(cast_rows_e4m3_kernel<2>, ceil_div(vectors, 2));
  if (vectors <= 4 * kMostThreads) return run(cast_rows_e4m3_kernel<4>, ceil_div(vectors, 4));
  run(cast_rows_e4m3_kernel<kMostHeld>, ceil_div(vectors, kMostHeld));
}

void cast_weight_e4m3(Context& ctx, const E4m3Rows& rows, const E4m3Rows& columns, const ConstTensor& w) {
  TRIAD_CHECK(is_aligned(w), "cast_weight_e4m3: {} is not aligned to 16 bytes", w.str());
  const int M = static_cast<int>(w.size(0)), K = static_cast<int>(w.size(1));
  Scratch::Scope scope(ctx.scratch);
  const Tensor largest = scope.alloc(DType::i32, {M + K}, "largest elements");
  zero(ctx, largest);
  auto* const of_row = reinterpret_cast<uint32_t*>(largest.ptr<int32_t>());
  launch(ctx, "cast_weight_e4m3", weight_maxima_kernel, dim3(ceil_div(K, kMaximaColumns), ceil_div(M, kMaximaRows)),
         dim3(32 * kMaximaWarps), 0, of_row, of_row + M, w.ptr<__nv_bfloat16>(), M, K);
  const auto cast_of = [](const E4m3Rows& r, const uint32_t* its) {
    return Cast{r.q.ptr<uint8_t>(), r.scale.ptr<float>(), its};
  };
  launch(ctx, "cast_weight_e4m3", cast_weight_e4m3_kernel, dim3(ceil_div(K, kTile), ceil_div(M, kTile)), dim3(256), 0,
         cast_of(rows, of_row), cast_of(columns, of_row + M), w.ptr<__nv_bfloat16>(), M, K);
}

}  // namespace triad::cuda
