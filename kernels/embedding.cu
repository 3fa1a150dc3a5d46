// The token table on the GPU. Forward copies a row per warp: N rows of the table in, N rows out.
// Backward must add rows of equal tokens in one order, and fast even where one token has 10,000 rows:
//   1. a stable radix sort of (token, row) lists equal tokens side by side, rows ascending;
//   2. the list is cut into pieces of 32 entries, whatever the tokens are. A warp sums the runs of equal tokens of one
//      piece in 32 vectors of columns. A run that lies inside of the piece is all its token has: it goes to dw. One
//      that crosses a border of the piece goes to scratch, where a piece has two places: for the run that begins with
//      the piece, and for one that begins later and goes on in the next piece;
//   3. where such a run begins, a CTA adds up its partial sums: 8 lanes of pieces, then the lanes in order.
// Each token's row of dw is written once, by step 2 or by step 3. dy is read once (50 MB for 32,768 x 768 in bf16), the
// partial sums are 2/32 rows of f32 per row of dy at most. No size depends on the tokens, so nothing waits for the
// host.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "kernels/bthd.cuh"
#include "kernels/embedding.h"

namespace triad::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarps = 8;
constexpr int kPiece = 32;  // entries of the sorted list: one for each lane
constexpr int kBatch = 4;   // rows of dy whose loads are in flight together
constexpr int kJoinLanes = 8;
static_assert(kPiece == 32 && kPiece % kBatch == 0);

template <class T, int V>
__global__ void __launch_bounds__(32 * kWarps)
    gather_kernel(T* __restrict__ y, int64_t y_stride, const int32_t* __restrict__ tokens, const T* __restrict__ w,
                  int64_t w_stride, int64_t N, int64_t C) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= N) return;
  const T* from = w + tokens[row] * w_stride;
  T* to = y + row * y_stride;
#pragma unroll 4
  for (int64_t c = threadIdx.x % 32 * V; c < C; c += 32 * V) {
    float x[V];
    load_vector<V>(x, from + c);
    store_vector<V>(to + c, x);
  }
}

__global__ void __launch_bounds__(32 * kWarps) iota_kernel(int32_t* rows, int64_t N) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < N) rows[i] = static_cast<int32_t>(i);
}

// The (token, row) pairs by token, then row.
struct SortedRows {
  const int32_t* tokens;
  const int32_t* rows;
  int64_t N;
  // -1 beyond either end: no token
  __device__ int32_t token(int64_t i) const { return 0 <= i && i < N ? tokens[i] : -1; }
};

// Step 2. A warp: one piece, 32 vectors of columns.
template <class T, int V>
__global__ void __launch_bounds__(32 * kWarps)
    sum_pieces_kernel(float* __restrict__ dw, int64_t dw_stride, float* __restrict__ partials, const T* __restrict__ dy,
                      int64_t dy_stride, SortedRows sorted, int64_t C, int64_t column_groups) {
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, piece = warp / column_groups;
  const int64_t begin = piece * kPiece;
  if (begin >= sorted.N) return;  // the whole warp
  const int lane = threadIdx.x % 32, count = static_cast<int>(min(int64_t{kPiece}, sorted.N - begin));
  const int64_t column = (warp % column_groups * 32 + lane) * V;
  const bool inside = column < C;
  const int32_t before = sorted.token(begin - 1), after = sorted.token(begin + count);
  // Lane i holds entry i.
  const int32_t lane_token = lane < count ? sorted.tokens[begin + lane] : -1;
  const int32_t lane_row = lane < count ? sorted.rows[begin + lane] : 0;

  float sum[V] = {};
  int run_begin = 0;
  for (int first = 0; first < count; first += kBatch) {
    float x[kBatch][V];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int64_t row = __shfl_sync(kAllLanes, lane_row, first + k);
      if (inside && first + k < count) load_vector<V>(x[k], dy + row * dy_stride + column);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = first + k;
      const int32_t token = __shfl_sync(kAllLanes, lane_token, i);
      const int32_t next_in_piece = __shfl_sync(kAllLanes, lane_token, (i + 1) % 32);
      const int32_t next = i + 1 < count ? next_in_piece : after;
      if (i >= count) break;  // all of these conditions are the same for the whole warp
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += inside ? x[k][j] : 0.0f;
      if (token == next && i + 1 < count) continue;
      const bool from_before = run_begin == 0 && token == before, goes_on = token == next;
      if (inside) {
        if (from_before || goes_on) {
          store_vector<V>(partials + (2 * piece + (run_begin == 0 ? 0 : 1)) * C + column, sum);
        } else {
          float* to = dw + token * dw_stride + column;
          float total[V];
          load_vector<V>(total, to);
#pragma unroll
          for (int j = 0; j < V; ++j) total[j] += sum[j];
          store_vector<V>(to, total);
        }
      }
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] = 0;
      run_begin = i + 1;
    }
  }
}

// Step 3. A CTA: the run that begins in one piece and goes on in the next, if there is one; 32 vectors of columns.
template <int V>
__global__ void __launch_bounds__(32 * kJoinLanes)
    join_pieces_kernel(float* __restrict__ dw, int64_t dw_stride, const float* __restrict__ partials, SortedRows sorted,
                       int64_t C, int64_t column_groups) {
  const int64_t piece = blockIdx.x / column_groups, begin = piece * kPiece, next = begin + kPiece;
  if (next >= sorted.N) return;
  const int32_t token = sorted.tokens[next - 1];
  const bool whole_piece = sorted.tokens[begin] == token;
  if (sorted.tokens[next] != token || (whole_piece && sorted.token(begin - 1) == token)) return;  // the whole CTA

  int64_t low = next, high = sorted.N;  // the run ends at the first entry of a greater token
  while (low + 1 < high) {
    const int64_t middle = (low + high) / 2;
    (sorted.tokens[middle] == token ? low : high) = middle;
  }
  const int64_t last_piece = low / kPiece;
  const int64_t column = (blockIdx.x % column_groups * 32 + threadIdx.x) * V;
  float sum[V] = {};
  if (column < C) {
#pragma unroll 4
    for (int64_t p = piece + threadIdx.y; p <= last_piece; p += kJoinLanes) {
      float x[V];
      load_vector<V>(x, partials + (2 * p + (p == piece && !whole_piece ? 1 : 0)) * C + column);
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += x[j];
    }
  }
  __shared__ float lanes[kJoinLanes][V][32];
#pragma unroll
  for (int j = 0; j < V; ++j) lanes[threadIdx.y][j][threadIdx.x] = sum[j];
  __syncthreads();
  if (threadIdx.y != 0 || column >= C) return;
  float total[V];
  load_vector<V>(total, dw + token * dw_stride + column);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    for (int i = 1; i < kJoinLanes; ++i) sum[j] += lanes[i][j][threadIdx.x];
    total[j] += sum[j];
  }
  store_vector<V>(dw + token * dw_stride + column, total);
}

// Step 1. The result lives in `scope`.
SortedRows sort_rows(Context& ctx, Scratch::Scope& scope, const ConstTensor& tokens, int64_t V) {
  const int64_t N = tokens.size(0);
  const Tensor rows = scope.alloc(DType::i32, {N}), sorted_tokens = scope.alloc(DType::i32, {N});
  const Tensor sorted_rows = scope.alloc(DType::i32, {N});
  // CUB tells what it needs only where there is a GPU, and a plan is made without one. It is two more buffers of N
  // (8 bytes a pair) and 1 KiB of counters for each tile of a few thousand pairs: this is that with room to spare.
  const Tensor temporary = scope.alloc(DType::u8, {(int64_t{1} << 16) + 16 * N});
  const SortedRows sorted{sorted_tokens.ptr<int32_t>(), sorted_rows.ptr<int32_t>(), N};
  launch(ctx, "iota", iota_kernel, dim3(ceil_div(N, 32 * kWarps)), dim3(32 * kWarps), 0, rows.ptr<int32_t>(), N);
  if (ctx.planning || N == 0) return sorted;

  const int bits = std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(V - 1))));
  const auto sort = [&](void* memory, size_t& bytes) {
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(memory, bytes, tokens.ptr<int32_t>(), sorted_tokens.ptr<int32_t>(),
                                               rows.ptr<int32_t>(), sorted_rows.ptr<int32_t>(), static_cast<int>(N), 0,
                                               bits, static_cast<cudaStream_t>(ctx.stream.handle())));
  };
  size_t bytes = 0;
  sort(nullptr, bytes);
  TRIAD_CHECK(static_cast<int64_t>(bytes) <= temporary.bytes(), "the sort of {} tokens needs {} bytes, not {}", N,
              bytes, temporary.bytes());
  sort(temporary.data, bytes);
  return sorted;
}

}  // namespace

void embedding_forward(Context& ctx, Tensor y, ConstTensor tokens, ConstTensor w) {
  const int64_t N = y.size(0), C = y.size(1);
  dispatch_gpu_float(y.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, y, w), [&]<int V>() {
      launch(ctx, "embedding gather", gather_kernel<T, V>, dim3(ceil_div(N, kWarps)), dim3(32 * kWarps), 0, y.ptr<T>(),
             y.stride[0], tokens.ptr<int32_t>(), w.ptr<T>(), w.stride[0], N, C);
    });
  });
}

void embedding_backward(Context& ctx, Tensor dw, ConstTensor dy, ConstTensor tokens) {
  const int64_t N = dy.size(0), C = dy.size(1), pieces = ceil_div(N, kPiece);
  Scratch::Scope scope(ctx.scratch);
  const SortedRows sorted = sort_rows(ctx, scope, tokens, dw.size(0));
  const Tensor partials = scope.alloc(DType::f32, {pieces, 2, C});
  dispatch_gpu_float(dy.dtype, [&]<class T>() {
    dispatch_vector<T>(all_have_vectors(kVector<T>, dy, dw), [&]<int V>() {
      const int64_t column_groups = ceil_div(C, 32 * V);
      launch(ctx, "embedding sum_pieces", sum_pieces_kernel<T, V>, dim3(ceil_div(pieces * column_groups, kWarps)),
             dim3(32 * kWarps), 0, dw.ptr<float>(), dw.stride[0], partials.ptr<float>(), dy.ptr<T>(), dy.stride[0],
             sorted, C, column_groups);
      launch(ctx, "embedding join_pieces", join_pieces_kernel<V>, dim3(pieces * column_groups), dim3(32, kJoinLanes), 0,
             dw.ptr<float>(), dw.stride[0], partials.ptr<float>(), sorted, C, column_groups);
    });
  });
}

}  // namespace triad::cuda
