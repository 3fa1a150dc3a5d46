// Casts from bf16 to e4m3 with a scale for each row, on the GPU.
//
// cast_rows is bound by memory: 3 bytes an element. A CTA has a row. Its threads hold the row's 16-byte vectors in
// registers while they find its largest element, so the row is read once; rows of more than 32,768 elements, and rows
// without 16-byte alignment, are read twice.
//
// cast_columns needs the largest element of a column before its first byte: one kernel finds them, by atomic maxima of
// the floats' bits (which no order changes), a second one casts tiles of 64x64 and transposes them in shared memory.
// 2 + 2 bytes read and 1 written an element.
//
// transpose_e4m3 is bound by memory: one byte read and one written an element. One CTA finds the largest product of two
// scales. Then a CTA has a tile of 128 rows and 128 columns, whose factors it computes once: a thread loads 4 columns
// of 4 groups of 4 rows before it uses the first, scales them as halves, which hold every e4m3 times a power of two
// down to 2^-24 (below 2^-10, e4m3 has only zero), and transposes the 4x4 bytes in registers. Shared memory holds words
// of 4 rows, from which rows of the result are stored.
//
// count_e4m3 reads one row in 16, a warp each. The sums are whole numbers below 2^53, which no order of the atomic
// additions changes.
#include <algorithm>

#include "kernels/common/block_order.cuh"
#include "kernels/ops/cast_e4m3.cuh"

namespace triad::cuda {
namespace {

// kHeld: the vectors of a row that each thread holds.
template <int kHeld>
__global__ void __launch_bounds__(512)
    cast_rows_e4m3_kernel(uint8_t* __restrict__ q, int64_t q_stride, float* __restrict__ scale,
                          const __nv_bfloat16* __restrict__ x, int64_t stride, int64_t K) {
  const int64_t row = block_from_end();
  const int vectors = static_cast<int>(K / kE4m3Vector);
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
  const E4m3Scale its(block_largest(largest));
  if (threadIdx.x == 0) scale[row] = its.value();
  uint2* const to = reinterpret_cast<uint2*>(q + row * q_stride);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i < vectors) to[i] = its.cast(held[k]);
  }
}

// Any row length and alignment.
__global__ void __launch_bounds__(512)
    cast_any_rows_e4m3_kernel(uint8_t* __restrict__ q, int64_t q_stride, float* __restrict__ scale,
                              const __nv_bfloat16* __restrict__ x, int64_t stride, int64_t K) {
  const int64_t row = block_from_end();
  const __nv_bfloat16* const from = x + row * stride;
  uint32_t largest = 0;
  for (int64_t i = threadIdx.x; i < K; i += blockDim.x) largest = max(largest, size_bits(to_float(from[i])));
  const E4m3Scale its(block_largest(largest));
  if (threadIdx.x == 0) scale[row] = its.value();
  for (int64_t i = threadIdx.x; i < K; i += blockDim.x) q[row * q_stride + i] = its.cast(to_float(from[i]));
}

// Adds a tile of 64 rows and 256 columns to the columns' maxima.
constexpr int kMaximaRows = 64, kMaximaColumns = 256, kMaximaWarps = 8;
__global__ void __launch_bounds__(32 * kMaximaWarps)
    column_maxima_kernel(uint32_t* __restrict__ largest, const __nv_bfloat16* __restrict__ w, int M, int K) {
  __shared__ uint32_t columns[kMaximaColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * kMaximaColumns + lane * kE4m3Vector, first = blockIdx.y * kMaximaRows;
  columns[threadIdx.x] = 0;
  __syncthreads();
  uint32_t mine[kE4m3Vector] = {};
#pragma unroll
  for (int k = 0; k < kMaximaRows / kMaximaWarps; ++k) {
    const int row = first + warp + k * kMaximaWarps;
    if (row >= M || column >= K) break;
    float x[kE4m3Vector];
    as_floats<__nv_bfloat16>(x, *reinterpret_cast<const uint4*>(w + int64_t{row} * K + column));
#pragma unroll
    for (int i = 0; i < kE4m3Vector; ++i) mine[i] = max(mine[i], size_bits(x[i]));
  }
#pragma unroll
  for (int i = 0; i < kE4m3Vector; ++i) atomicMax(columns + lane * kE4m3Vector + i, mine[i]);
  __syncthreads();
  const int its = blockIdx.x * kMaximaColumns + threadIdx.x;
  if (its < K) atomicMax(largest + its, columns[threadIdx.x]);
}

// Where a tile's row lies in a column: pieces of 16 rows are exchanged by the column's number, so that a warp, which
// writes every eighth column at once, meets 4 groups of banks instead of one.
constexpr int kTile = 64;
__device__ __forceinline__ int place_of(int row, int column) { return row ^ column / kE4m3Vector % 4 * 16; }
__global__ void __launch_bounds__(256)
    cast_columns_e4m3_kernel(uint8_t* __restrict__ q, int64_t q_stride, float* __restrict__ scale,
                             const uint32_t* __restrict__ largest, const __nv_bfloat16* __restrict__ w, int M, int K) {
  __shared__ alignas(16) uint8_t tile[kTile][kTile];  // [column][row]
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  constexpr int kVectors = kTile / kE4m3Vector, kPerThread = kTile * kVectors / 256;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * 256, r = i / kVectors, c = i % kVectors * kE4m3Vector;
    const int row = first_row + r, column = first_column + c;
    if (row >= M || column >= K) continue;
    float x[kE4m3Vector];
    as_floats<__nv_bfloat16>(x, *reinterpret_cast<const uint4*>(w + int64_t{row} * K + column));
#pragma unroll
    for (int j = 0; j < kE4m3Vector; ++j) {
      const E4m3Scale its(largest[column + j]);
      if (row == 0) scale[column + j] = its.value();
      tile[c + j][place_of(r, c)] = its.cast(x[j]);
    }
  }
  __syncthreads();
  const int c = threadIdx.x / (kTile / 16), r = threadIdx.x % (kTile / 16) * 16;
  const int row = first_row + r, column = first_column + c;
  if (row < M && column < K)
    *reinterpret_cast<uint4*>(q + column * q_stride + row) = *reinterpret_cast<const uint4*>(&tile[c][place_of(r, c)]);
}

constexpr int kCountWarps = 8;
__global__ void __launch_bounds__(32 * kCountWarps)
    count_e4m3_kernel(double* __restrict__ counts, const uint8_t* __restrict__ q, int64_t q_stride, int64_t N, int K) {
  const int64_t row = (int64_t{blockIdx.x} * kCountWarps + threadIdx.x / 32) * kE4m3CountedRows;
  if (row >= N) return;
  const uint4* const from = reinterpret_cast<const uint4*>(q + row * q_stride);
  unsigned zeros = 0, nans = 0;
  for (int i = threadIdx.x % 32; i < K / 16; i += 32) {
    const uint4 vector = from[i];
    for (const uint32_t word : {vector.x, vector.y, vector.z, vector.w}) {
      const uint32_t sizes = word & 0x7f7f7f7fu;
      zeros += __popc(__vcmpeq4(sizes, 0)) / 8;
      nans += __popc(__vcmpeq4(sizes, 0x7f7f7f7fu)) / 8;
    }
  }
  zeros = __reduce_add_sync(kFullWarp, zeros), nans = __reduce_add_sync(kFullWarp, nans);
  if (threadIdx.x % 32 != 0 || zeros == static_cast<unsigned>(K)) return;
  atomicAdd(counts + E4m3Counts::values, static_cast<double>(K));
  if (zeros > 0) atomicAdd(counts + E4m3Counts::zeros, static_cast<double>(zeros));
  if (nans > 0) atomicAdd(counts + E4m3Counts::nans, static_cast<double>(nans));
}

constexpr uint32_t kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;

// largest: bits of the scales of A's and B's transposes, whose exponents are halves of the largest sum of a row's.
constexpr int kScaleThreads = 1024, kScaleBatch = 8;
__global__ void __launch_bounds__(kScaleThreads)
    largest_scales_kernel(uint32_t* __restrict__ a_common, uint32_t* __restrict__ b_common,
                          const uint32_t* __restrict__ a, const uint32_t* __restrict__ b, int N) {
  constexpr uint32_t kNanSum = 1u << 10;  // above every sum
  __shared__ uint32_t warp_results[kScaleThreads / 32];
  uint32_t mine = 0;
  for (int first = threadIdx.x; first < N; first += kScaleBatch * kScaleThreads) {
    uint32_t x[kScaleBatch], y[kScaleBatch];
#pragma unroll
    for (int k = 0; k < kScaleBatch; ++k) {
      const int i = first + k * kScaleThreads;
      x[k] = i < N ? a[i] : 0, y[k] = i < N ? b[i] : 0;
    }
#pragma unroll
    for (int k = 0; k < kScaleBatch; ++k)
      mine = max(mine, max(x[k], y[k]) >= kInfinityBits ? kNanSum : (x[k] >> 23) + (y[k] >> 23));
  }
  mine = __reduce_max_sync(kFullWarp, mine);
  if (threadIdx.x % 32 == 0) warp_results[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  mine = __reduce_max_sync(kFullWarp, warp_results[threadIdx.x]);
  if (threadIdx.x != 0) return;
  *a_common = mine == kNanSum ? kNanBits : mine / 2 << 23;
  *b_common = mine == kNanSum ? kNanBits : (mine - mine / 2) << 23;
}

// Four e4m3, each times `factor`, a power of two or 0.
__device__ __forceinline__ uint32_t scaled(uint32_t bytes, __half2 factor) {
  uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(bytes >> 16 * i);
    const __half2 x = __hmul2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)), factor);
    result |= uint32_t{__nv_cvt_halfraw2_to_fp8x2(static_cast<__half2_raw>(x), __NV_SATFINITE, __NV_E4M3)} << 16 * i;
  }
  return result;
}

// The scales of the rows of A and B, and their common ones, as bits.
struct Scales {
  const uint32_t *a, *b, *common_a, *common_b;
};

constexpr int kTransposeTile = 128, kTransposeWords = kTransposeTile / 4, kTransposePitch = kTransposeWords + 1,
              kTransposeWarps = 8;
template <bool kIsA>
__global__ void __launch_bounds__(32 * kTransposeWarps)
    transpose_e4m3_kernel(uint8_t* __restrict__ to, const uint8_t* __restrict__ from, int64_t from_stride,
                          const Scales scales, int N, int K, int padded) {
  constexpr int kGroups = kTransposeWords / kTransposeWarps;   // groups of 4 rows per thread
  __shared__ uint32_t tile[kTransposeTile * kTransposePitch];  // [column][4 rows]
  __shared__ __half2 factors[kTransposeTile];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = blockIdx.y * kTransposeTile, first_column = blockIdx.x * kTransposeTile,
            column = first_column + 4 * lane;
  uint32_t loaded[kGroups][4];  // past the last row or column, the last one's
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = min(first_row + 4 * (warp + i * kTransposeWarps) + r, N - 1);
      loaded[i][r] = *reinterpret_cast<const uint32_t*>(from + row * from_stride + min(column, K - 4));
    }
  }
  const uint32_t common_a = *scales.common_a;
  const bool is_nan = common_a >= kInfinityBits;
  if (threadIdx.x < kTransposeTile) {
    const int row = min(first_row + static_cast<int>(threadIdx.x), N - 1);
    const uint32_t largest = (common_a >> 23) + (*scales.common_b >> 23),
                   below = largest - (scales.a[row] >> 23) - (scales.b[row] >> 23),
                   mine = kIsA ? below / 2 : below - below / 2;
    factors[threadIdx.x] = __float2half2_rn(__uint_as_float((127u - min(mine, 127u)) << 23));
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int group = warp + i * kTransposeWarps;
    uint32_t x[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t bytes = scaled(loaded[i][r], factors[4 * group + r]);
      x[r] = first_row + 4 * group + r >= N ? 0 : is_nan ? 0x01010101u * kE4m3Nan : bytes;
    }
    // Word j: byte j of each of the four rows.
    const uint32_t low01 = __byte_perm(x[0], x[1], 0x5140), high01 = __byte_perm(x[0], x[1], 0x7362);
    const uint32_t low23 = __byte_perm(x[2], x[3], 0x5140), high23 = __byte_perm(x[2], x[3], 0x7362);
    const uint32_t words[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                               __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632)};
    // Lanes 8 apart begin with different words, so that a warp's 32 are in 32 banks: words are rotated by lane / 8 % 4,
    // in two steps without branches.
    uint32_t by_one[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) by_one[j] = (lane & 8) != 0 ? words[(j + 1) % 4] : words[j];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      tile[(4 * lane + (j + lane / 8) % 4) * kTransposePitch + group] =
          (lane & 16) != 0 ? by_one[(j + 2) % 4] : by_one[j];
  }
  __syncthreads();
  const int row = first_row + 4 * lane;
  if (row >= padded) return;
  for (int c = warp; c < min(kTransposeTile, K - first_column); c += kTransposeWarps)
    *reinterpret_cast<uint32_t*>(to + int64_t{first_column + c} * padded + row) = tile[c * kTransposePitch + lane];
}

template <bool kIsA>
void transpose(Context& ctx, const E4m3Columns& columns, const E4m3Rows& rows, const Scales& scales) {
  const int N = static_cast<int>(rows.q.size(0)), K = static_cast<int>(rows.q.size(1)),
            padded = static_cast<int>(columns.q.size(1));
  if (K == 0) return;
  launch(
      ctx, "transpose_e4m3", transpose_e4m3_kernel<kIsA>,
      dim3(static_cast<unsigned>(ceil_div(K, kTransposeTile)), static_cast<unsigned>(ceil_div(padded, kTransposeTile))),
      dim3(32 * kTransposeWarps), 0, columns.q.ptr<uint8_t>(), rows.q.ptr<uint8_t>(), rows.q.stride[0], scales, N, K,
      padded);
}

}  // namespace

void count_e4m3(Context& ctx, const Tensor& counts, const E4m3Rows& rows) {
  const int64_t N = rows.q.size(0);
  launch(ctx, "count_e4m3", count_e4m3_kernel, dim3(ceil_div(ceil_div(N, kE4m3CountedRows), int64_t{kCountWarps})),
         dim3(32 * kCountWarps), 0, counts.ptr<double>(), rows.q.ptr<uint8_t>(), rows.q.stride[0], N,
         static_cast<int>(rows.q.size(1)));
}

void cast_rows_e4m3(Context& ctx, const E4m3Rows& rows, const ConstTensor& x) {
  constexpr int64_t kMostThreads = 512;
  const int64_t K = x.size(1);
  const auto run = [&](auto kernel, unsigned threads) {
    launch(ctx, "cast_rows_e4m3", kernel, dim3(static_cast<unsigned>(x.size(0))), dim3(threads), 0,
           rows.q.ptr<uint8_t>(), rows.q.stride[0], rows.scale.ptr<float>(), x.ptr<__nv_bfloat16>(), x.stride[0], K);
  };
  const auto hold = [&]<int kHeld>(unsigned threads) { run(cast_rows_e4m3_kernel<kHeld>, threads); };
  const bool vectors =
      K > 0 && has_vectors(x, kE4m3Vector) && rows.q.stride[0] % kE4m3Vector == 0 && is_aligned(rows.q);
  if (vectors && dispatch_held_vectors(K / kE4m3Vector, hold)) return;
  run(cast_any_rows_e4m3_kernel, static_cast<unsigned>(std::clamp(round_up(K, 32), int64_t{32}, kMostThreads)));
}

void cast_columns_e4m3(Context& ctx, const E4m3Rows& columns, const ConstTensor& w) {
  TRIAD_CHECK(is_aligned(w), "cast_columns_e4m3: {} is not aligned to 16 bytes", w.str());
  const int M = static_cast<int>(w.size(0)), K = static_cast<int>(w.size(1));
  Scratch::Scope scope(ctx.scratch);
  const Tensor largest = scope.alloc(DType::i32, {K}, "largest elements");
  zero(ctx, largest);
  auto* const maxima = reinterpret_cast<uint32_t*>(largest.ptr<int32_t>());
  launch(ctx, "cast_columns_e4m3", column_maxima_kernel, dim3(ceil_div(K, kMaximaColumns), ceil_div(M, kMaximaRows)),
         dim3(32 * kMaximaWarps), 0, maxima, w.ptr<__nv_bfloat16>(), M, K);
  launch(ctx, "cast_columns_e4m3", cast_columns_e4m3_kernel, dim3(ceil_div(K, kTile), ceil_div(M, kTile)), dim3(256), 0,
         columns.q.ptr<uint8_t>(), columns.q.stride[0], columns.scale.ptr<float>(), maxima, w.ptr<__nv_bfloat16>(), M,
         K);
}

void transpose_e4m3(Context& ctx, const E4m3Columns& a, const E4m3Columns& b, const E4m3Rows& a_rows,
                    const E4m3Rows& b_rows) {
  const auto bits = [](const Tensor& scales) { return reinterpret_cast<uint32_t*>(scales.ptr<float>()); };
  const Scales scales = {bits(a_rows.scale), bits(b_rows.scale), bits(a.scale), bits(b.scale)};
  launch(ctx, "transpose_e4m3 scales", largest_scales_kernel, dim3(1), dim3(kScaleThreads), 0, bits(a.scale),
         bits(b.scale), scales.a, scales.b, static_cast<int>(a_rows.q.size(0)));
  transpose<true>(ctx, a, a_rows, scales);
  transpose<false>(ctx, b, b_rows, scales);
}

}  // namespace triad::cuda
