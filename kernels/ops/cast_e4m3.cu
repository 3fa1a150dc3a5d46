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
    cast_rows_e4m3_kernel(uint8_t* __restrict__ q, float* __restrict__ scale, const __nv_bfloat16* __restrict__ x,
                          int64_t stride, int64_t K) {
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
  uint2* const to = reinterpret_cast<uint2*>(q + row * K);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i < vectors) to[i] = its.cast(held[k]);
  }
}

// Any row length and alignment.
__global__ void __launch_bounds__(512)
    cast_any_rows_e4m3_kernel(uint8_t* __restrict__ q, float* __restrict__ scale, const __nv_bfloat16* __restrict__ x,
                              int64_t stride, int64_t K) {
  const int64_t row = block_from_end();
  const __nv_bfloat16* const from = x + row * stride;
  uint32_t largest = 0;
  for (int64_t i = threadIdx.x; i < K; i += blockDim.x) largest = max(largest, size_bits(to_float(from[i])));
  const E4m3Scale its(block_largest(largest));
  if (threadIdx.x == 0) scale[row] = its.value();
  for (int64_t i = threadIdx.x; i < K; i += blockDim.x) q[row * K + i] = its.cast(to_float(from[i]));
}

// Adds a tile of 64 rows and 256 columns to the maxima of rows and columns.
constexpr int kMaximaRows = 64, kMaximaColumns = 256, kMaximaWarps = 8;
__global__ void __launch_bounds__(32 * kMaximaWarps)
    weight_maxima_kernel(uint32_t* __restrict__ of_row, uint32_t* __restrict__ of_column,
                         const __nv_bfloat16* __restrict__ w, int M, int K) {
  __shared__ uint32_t columns[kMaximaColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.x * kMaximaColumns + lane * kE4m3Vector, first = blockIdx.y * kMaximaRows;
  columns[threadIdx.x] = 0;
  __syncthreads();
  uint32_t mine[kE4m3Vector] = {};
  for (int row = first + warp; row < min(first + kMaximaRows, M); row += kMaximaWarps) {
    uint32_t largest = 0;
    if (column < K) {
      float x[kE4m3Vector];
      as_floats<__nv_bfloat16>(x, *reinterpret_cast<const uint4*>(w + int64_t{row} * K + column));
#pragma unroll
      for (int i = 0; i < kE4m3Vector; ++i) {
        mine[i] = max(mine[i], size_bits(x[i]));
        largest = max(largest, size_bits(x[i]));
      }
    }
    largest = warp_largest(largest);
    if (lane == 0) atomicMax(of_row + row, largest);
  }
#pragma unroll
  for (int i = 0; i < kE4m3Vector; ++i) atomicMax(columns + lane * kE4m3Vector + i, mine[i]);
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
  constexpr int kVectors = kTile / kE4m3Vector, kPerThread = kTile * kVectors / 256;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * 256, r = i / kVectors, c = i % kVectors * kE4m3Vector;
    const int row = first_row + r, column = first_column + c;
    if (row >= M || column >= K) continue;
    const int64_t at = int64_t{row} * K + column;
    const uint4 vector = *reinterpret_cast<const uint4*>(w + at);
    const E4m3Scale of_row(rows.largest[row]);
    if (column == 0) rows.scale[row] = of_row.value();
    *reinterpret_cast<uint2*>(rows.q + at) = of_row.cast(vector);
    float x[kE4m3Vector];
    as_floats<__nv_bfloat16>(x, vector);
#pragma unroll
    for (int j = 0; j < kE4m3Vector; ++j) {
      const E4m3Scale of_column(columns.largest[column + j]);
      if (row == 0) columns.scale[column + j] = of_column.value();
      tile[c + j][r] = of_column.cast(x[j]);
    }
  }
  __syncthreads();
  const int c = threadIdx.x / (kTile / 16), r = threadIdx.x % (kTile / 16) * 16;
  const int row = first_row + r, column = first_column + c;
  if (row < M && column < K)
    *reinterpret_cast<uint4*>(columns.q + int64_t{column} * M + row) = *reinterpret_cast<const uint4*>(&tile[c][r]);
}

constexpr int kCountWarps = 8;
__global__ void __launch_bounds__(32 * kCountWarps)
    count_e4m3_kernel(double* __restrict__ counts, const uint8_t* __restrict__ q, int64_t N, int K) {
  const int64_t row = (int64_t{blockIdx.x} * kCountWarps + threadIdx.x / 32) * kE4m3CountedRows;
  if (row >= N) return;
  const uint4* const from = reinterpret_cast<const uint4*>(q + row * K);
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

}  // namespace

void count_e4m3(Context& ctx, const Tensor& counts, const E4m3Rows& rows) {
  const int64_t N = rows.q.size(0);
  launch(ctx, "count_e4m3", count_e4m3_kernel, dim3(ceil_div(ceil_div(N, kE4m3CountedRows), int64_t{kCountWarps})),
         dim3(32 * kCountWarps), 0, counts.ptr<double>(), rows.q.ptr<uint8_t>(), N, static_cast<int>(rows.q.size(1)));
}

void cast_rows_e4m3(Context& ctx, const E4m3Rows& rows, const ConstTensor& x) {
  constexpr int64_t kMostThreads = 512;
  const int64_t K = x.size(1);
  const auto run = [&](auto kernel, unsigned threads) {
    launch(ctx, "cast_rows_e4m3", kernel, dim3(static_cast<unsigned>(x.size(0))), dim3(threads), 0,
           rows.q.ptr<uint8_t>(), rows.scale.ptr<float>(), x.ptr<__nv_bfloat16>(), x.stride[0], K);
  };
  const auto hold = [&]<int kHeld>(unsigned threads) { run(cast_rows_e4m3_kernel<kHeld>, threads); };
  if (K > 0 && has_vectors(x, kE4m3Vector) && dispatch_held_vectors(K / kE4m3Vector, hold)) return;
  run(cast_any_rows_e4m3_kernel, static_cast<unsigned>(std::clamp(round_up(K, 32), int64_t{32}, kMostThreads)));
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
