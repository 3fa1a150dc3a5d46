// y = x w^T for 9 to 64 rows of x in bf16 on Hopper, on tensor cores. A call computes little, so the layer is cut into
// about as many parts as there are SMs, in columns of y and along the inner dimension: the CTAs of a cluster have a
// slice of the inner dimension each, and the same columns.
//   x:  a CTA loads its slice of the rows to shared memory once and normalises it there. For the RMSNorm the CTAs
//       exchange their slices' square sums.
//   w:  each of 8 warps computes 16 columns for all rows, over every other 64-byte piece of its CTA's slice, and loads
//       w directly into the MMA operands' registers, kHeld pieces ahead: the first ones while the previous kernel still
//       runs. Element order along k does not matter as long as x and w share it (decode/skinny_linear_mma.cu).
//   sums:  every CTA of the cluster reads its share of the outputs from all CTAs' shared memory, adds them in order and
//       stores the results.
// CTAs loop over columns where there are more than the card has room for. How the inner dimension is cut depends on the
// layer alone, so a row's bits depend neither on the number of rows nor on its place among them.
#include <algorithm>

#include "kernels/common/launch_cluster.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/decode/skinny_linear.cuh"

namespace triad::cuda {
namespace {

using Activation = SkinnyLinearOptions::Activation;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRows = kMostRows;               // most rows of x
constexpr int kRowThreads = kThreads / kRows;  // threads that load and normalise a row of x
constexpr int kPiece = 32;                     // elements in a piece of a row: one 16-byte vector for each of 4 lanes
constexpr int kGroups = 4;                     // warps with different columns
constexpr int kHalves = kWarps / kGroups;      // warps with the same columns, and different pieces
constexpr int kTileColumns = 16 * kGroups;     // w's rows in a CTA's tile; for swiglu half of them are gate, half up
constexpr int kSumRow = kTileColumns + 4;      // floats between rows of sums; this many avoid bank conflicts
constexpr int kHeld = 6;                       // pieces that a warp has in registers
constexpr int kMaxSlices = 8;                  // most CTAs in a cluster
constexpr int kEnoughCtas = 96;                // fewest CTAs for which the inner dimension is not cut further

// The shared memory for slices of `pieces` pieces. Rows of x have 64 bytes between them, which avoids bank conflicts.
struct ManyMemory {
  int pieces;
  __host__ __device__ int x_row() const { return pieces * kPiece + kPiece; }
  __host__ __device__ int norm() const { return kRows * x_row() * static_cast<int>(sizeof(bf16)); }  // offset, bytes
  __host__ __device__ int sums() const { return norm() + pieces * kPiece * static_cast<int>(sizeof(bf16)); }
  __host__ __device__ int squares() const {
    return sums() + kHalves * kRows * kSumRow * static_cast<int>(sizeof(float));
  }
  __host__ __device__ int bytes() const { return squares() + kRows * static_cast<int>(sizeof(float)); }
};

__device__ __forceinline__ void add(float4& sum, const float4& x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

// blockIdx: the slice of the inner dimension, the first tile of columns.
__global__ void __launch_bounds__(kThreads, 2)
    skinny_linear_many_kernel(SkinnyLinearArgs<bf16> a, Activation activation, ManyMemory memory, bool vectors) {
  const int slice = blockIdx.x, slices = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp % kGroups, half = warp / kGroups;
  const int k_begin = slice * memory.pieces * kPiece, k_end = min(a.in, k_begin + memory.pieces * kPiece);
  const int rows = a.rows, row_tiles = ceil_div(rows, kEight), x_row = memory.x_row();
  const int own = (memory.pieces - half + kHalves - 1) / kHalves;  // the warp's pieces half, half + 2, ...
  const int blocks = ceil_div(ceil_div(memory.pieces, kHalves), kHeld);
  const bool swiglu = activation == Activation::swiglu;
  const int width = swiglu ? kTileColumns / 2 : kTileColumns;  // y's columns in a tile
  const int stride = static_cast<int>(gridDim.y) * width;
  unsigned char* const shared = dynamic_shared();
  bf16* const x = reinterpret_cast<bf16*>(shared);
  uint4* const norm = reinterpret_cast<uint4*>(shared + memory.norm());
  float* const sums = reinterpret_cast<float*>(shared + memory.sums());
  float* const squares = reinterpret_cast<float*>(shared + memory.squares());

  uint4 w[2][kHeld];
  const auto load_piece = [&](int held, int column,
                              int i) {  // the warp's piece i, for the tile that begins at `column`
    const int k = k_begin + (half + kHalves * i) * kPiece + lane % 4 * kEight;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = column + (swiglu ? group : 2 * group + h) * kEight + lane / 4;
      const int64_t row = swiglu && h == 1 ? a.out + c : c;
      w[h][held] = i < own && k < k_end && c < a.out ? *reinterpret_cast<const uint4*>(a.w + row * a.w_stride + k)
                                                     : make_uint4(0, 0, 0, 0);
    }
  };
  int column = static_cast<int>(blockIdx.y) * width;
#pragma unroll
  for (int s = 0; s < kHeld; ++s) load_piece(s, column, s);
  if (a.norm != nullptr)
#pragma unroll 1
    for (int v = threadIdx.x; k_begin + v * kEight < k_end; v += kThreads)
      norm[v] = *reinterpret_cast<const uint4*>(a.norm + k_begin + v * kEight);
  pdl_wait();     // w and norm are weights; the previous kernel wrote x and the addend
  pdl_trigger();  // comes late, since the next kernel's weight loads would delay this kernel's

  // A thread loads and normalises the same vectors: every kRowThreads-th vector in a row.
  const int x_own = static_cast<int>(threadIdx.x) / kRowThreads, part = static_cast<int>(threadIdx.x) % kRowThreads;
  bf16* const to = x + x_own * x_row;
  if (x_own < row_tiles * kEight) {
    const bf16* const from = a.x + x_own * a.x_stride + k_begin;
#pragma unroll 4
    for (int v = part; v < memory.pieces * (kPiece / kEight); v += kRowThreads) {
      const bool there = x_own < rows && k_begin + v * kEight < k_end;
      copy_async_16(to + v * kEight, there ? from + v * kEight : a.x, there ? 16 : 0);
    }
  }
  copy_async_wait();
  if (a.norm != nullptr) {
    const int count = x_own < rows ? ceil_div(k_end - k_begin, kEight) : 0;
    float sum = 0;
#pragma unroll 4
    for (int v = part; v < count; v += kRowThreads)
      sum = sum_of_squares(*reinterpret_cast<const uint4*>(to + v * kEight), sum);
    sum = warp_sum<kRowThreads>(sum);
    if (part == 0) squares[x_own] = sum;
    sync_cluster();
    sum = 0;
#pragma unroll 1
    for (int s = 0; s < slices; ++s) sum += load_from_cta(squares + x_own, s);
    const float r = 1.0f / sqrtf(sum / static_cast<float>(a.in) + a.eps);
#pragma unroll 2
    for (int v = part; v < count; v += kRowThreads) {
      uint4* const at = reinterpret_cast<uint4*>(to + v * kEight);
      *at = normed(*at, norm[v], r);
    }
  }
  __syncthreads();

  const bf16* const x_lane = x + lane / 4 * x_row + lane % 4 * kEight;
#pragma unroll 1
  for (bool first = true; column < a.out; column += stride, first = false) {
    float sum[kRows / kEight][4] = {};
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const bool last = block + 1 == blocks;
#pragma unroll
      for (int s = 0; s < kHeld; ++s) {
        const int i = block * kHeld + s;
        if (i < own) {
          const uint4 w0 = w[0][s], w1 = w[1][s];
          const bf16* const at = x_lane + (half + kHalves * i) * kPiece;
#pragma unroll
          for (int n = 0; n < kRows / kEight; ++n) {
            if (n >= row_tiles) break;
            const uint4 v = *reinterpret_cast<const uint4*>(at + n * kEight * x_row);
            mma_m16n8k16(sum[n], {w0.x, w1.x, w0.y, w1.y}, v.x, v.y);
            mma_m16n8k16(sum[n], {w0.z, w1.z, w0.w, w1.w}, v.z, v.w);
          }
        }
        load_piece(s, last ? column + stride : column, last ? s : i + kHeld);
      }
    }
    if (!first) sync_cluster();  // all CTAs have read the last tile's sums
#pragma unroll
    for (int n = 0; n < kRows / kEight; ++n) {  // the lane has columns lane / 4 and + 8, rows 2 (lane % 4) and + 1
      if (n >= row_tiles) break;
      float* const at = sums + (half * kRows + n * kEight + lane % 4 * 2) * kSumRow + group * 16 + lane / 4;
      at[0] = sum[n][0], at[kSumRow] = sum[n][1], at[kEight] = sum[n][2], at[kSumRow + kEight] = sum[n][3];
    }
    sync_cluster();
    // The CTA's share of the outputs, four columns at a time.
    const int quads = width / 4, share = ceil_div(rows * quads, slices), end = min(rows * quads, (slice + 1) * share);
#pragma unroll 1
    for (int i = slice * share + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
      const int row = i / quads, j = i % quads * 4, c = column + j;
      const float* const at = sums + row * kSumRow + (swiglu ? j / kEight * 16 + j % kEight : j);
      const auto total = [&](const float* from) {
        float4 all = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int s = 0; s < slices; ++s)
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
            add(all, load_from_cta(reinterpret_cast<const float4*>(from + h * kRows * kSumRow), s));
        return all;
      };
      const float4 all = total(at), up = swiglu ? total(at + kEight) : make_float4(0, 0, 0, 0);
      const float gate_sums[4] = {all.x, all.y, all.z, all.w}, up_sums[4] = {up.x, up.y, up.z, up.w};
      bf16* const y = a.y + row * a.y_stride + c;
      const bf16* const addend = a.addend == nullptr ? nullptr : a.addend + row * a.addend_stride + c;
      const auto result = [&](int e, float added) {
        float out = gate_sums[e] + added;
        if (activation != Activation::none) out = silu_of_rounded<bf16>(out);
        return swiglu ? out * to_float(from_float<bf16>(up_sums[e])) : out;
      };
      if (vectors) {
        const uint2 added = addend == nullptr ? make_uint2(0, 0) : *reinterpret_cast<const uint2*>(addend);
        const auto low = [](uint32_t two) { return __uint_as_float(two << 16); };
        const auto high = [](uint32_t two) { return __uint_as_float(two & 0xffff0000u); };
        if (c < a.out)
          *reinterpret_cast<uint2*>(y) = make_uint2(pack_bf16(result(0, low(added.x)), result(1, high(added.x))),
                                                    pack_bf16(result(2, low(added.y)), result(3, high(added.y))));
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (c + e < a.out) y[e] = from_float<bf16>(result(e, addend == nullptr ? 0.0f : to_float(addend[e])));
      }
    }
  }
  sync_cluster();  // a CTA's shared memory lasts until all CTAs have read it
}

}  // namespace

bool launch_skinny_many(Context& ctx, const SkinnyLinearArgs<bf16>& a, Activation activation, bool vectors) {
  if (!ctx.may_use_sm90() || a.rows > kRows) return false;
  const SharedLimits limits = shared_limits(ctx);
  const int tiles = ceil_div(a.out, activation == Activation::swiglu ? kTileColumns / 2 : kTileColumns);
  const auto memory_of = [&](int slices) { return ManyMemory{ceil_div(ceil_div(a.in, kPiece), slices)}; };
  int slices = 1;
  while (slices < kMaxSlices && (tiles * slices < kEnoughCtas || memory_of(slices).bytes() > limits.cta_bytes))
    slices *= 2;
  const ManyMemory memory = memory_of(slices);
  if (memory.bytes() > limits.cta_bytes) return false;
  const int room = ctx.num_sms * (memory.bytes() <= limits.bytes_per_cta(2) ? 2 : 1);
  const int rounds = ceil_div(tiles * slices, room);  // tiles per CTA
  launch_cluster_pdl(ctx, "skinny_linear many", skinny_linear_many_kernel,
                     dim3(static_cast<unsigned>(slices), static_cast<unsigned>(ceil_div(tiles, rounds))),
                     dim3(kThreads), static_cast<size_t>(memory.bytes()), a, activation, memory, vectors);
  return true;
}

}  // namespace triad::cuda
