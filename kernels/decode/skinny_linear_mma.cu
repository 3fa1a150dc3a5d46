// y = x w^T for 2 to 64 rows of x in bf16 on tensor cores, where 8 rows cost no more than one; without them, each
// 16-byte vector of w would need 64 FMAs. The inner dimension is split over a CTA's warps: warp i processes the 64-byte
// pieces i, i + 8, ... in every row of w and x, and loads them directly into the MMA operands' registers. Element order
// along k does not matter as long as w and x share it. x stays in registers, the kernel loops over y's columns, and
// only sums go through shared memory:
//   columns per CTA:  16, or 8 if 16 would leave SMs idle (with more than 8 rows, most of them); for swiglu 8 gate
//       columns and their 8 up columns
//   rows:  tiles of 8. A row's sums have the same order whatever the number of tiles
//   first weights:  loaded before x, while the previous kernel still runs
//   next weights:  loaded as soon as the MMAs have read the current ones, while sums are added and stored
// More than 8 rows are for layers for which a CTA reads its rows of x once, since they come from L2 each time: rows
// that fit in registers, or as many CTAs as there are columns. Others: decode/skinny_linear_many.cu.
#include <algorithm>

#include "kernels/common/launch_pdl.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/decode/skinny_linear.cuh"

namespace triad::cuda {
namespace {

using Activation = SkinnyLinearOptions::Activation;
constexpr int kWarps = 8;
constexpr int kLanesOfPiece = 4;  // lanes per piece, each loading a 16-byte vector
constexpr int kQuarter = kEight * kEight, kThreads = 32 * kWarps;
static_assert(kFewRows <= kEight && kVector<bf16> == kEight);

// Shared memory: the warps' sums, double-buffered so that one barrier per column step is enough; square sums for the
// RMSNorm; the RMSNorm's weights.
template <int kHalves, int kTiles>
struct Memory {
  float sums[2][kWarps][kTiles][kHalves * kQuarter];
  float squares[kWarps][kTiles][kEight];
  uint4 norm[1];  // the RMSNorm's weights, as many as x's rows have elements
};
static_assert(sizeof(Memory<2, 1>) <= kMmaShared);

// How many CTAs per SM registers allow. No more are launched; they are persistent.
template <int kSteps, int kHalves, int kTiles>
constexpr int kCtasPerSm = kTiles > 1     ? (kTiles <= 2 ? 2 : 1)
                           : kHalves == 1 ? 2
                           : kSteps <= 3  ? 3
                                          : 1;

// kSteps: how many pieces of a row a warp holds in registers. Longer rows are processed kSteps pieces at a time, and x
// is read again each time. kHalves: 2: the MMA's 16 rows are two groups of 8 y columns; 1: they are one group, and
// zeros. kTiles: tiles of 8 rows of x.
template <int kSteps, int kHalves, int kTiles>
__global__ void __launch_bounds__(kThreads, kCtasPerSm<kSteps, kHalves, kTiles>)
    skinny_linear_mma_kernel(SkinnyLinearArgs<bf16> a, Activation activation) {
  Memory<kHalves, kTiles>& memory = *reinterpret_cast<Memory<kHalves, kTiles>*>(dynamic_shared());
  const bool swiglu = activation == Activation::swiglu;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / kLanesOfPiece;
  const int vectors = a.in / kEight, blocks = (vectors - 1) / (kSteps * kWarps * kLanesOfPiece) + 1;
  const int width = swiglu ? kEight : kEight * kHalves, stride = static_cast<int>(gridDim.x) * width;
  const auto vector_of = [&](int block, int step) {
    return ((block * kSteps + step) * kWarps + warp) * kLanesOfPiece + lane % kLanesOfPiece;
  };
  const auto load = [&](uint4(&to)[kSteps], const bf16* from, bool there, int block) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = vector_of(block, s);
      to[s] = there && v < vectors ? reinterpret_cast<const uint4*>(from)[v] : make_uint4(0, 0, 0, 0);
    }
  };
  uint4 w[kHalves][kSteps], x[kTiles][kSteps];
  const auto load_w = [&](int column, int block) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int c = column + row + (swiglu ? 0 : half * kEight);
      load(w[half], a.w + (swiglu && half == 1 ? a.out + c : c) * a.w_stride, c < a.out, block);
    }
  };
  const auto load_x = [&](int block) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int its = t * kEight + row;
      load(x[t], a.x + its * a.x_stride, its < a.rows, block);
    }
  };

  int column = static_cast<int>(blockIdx.x) * width;
  load_w(column, 0);
  if (a.norm != nullptr)
#pragma unroll 1
    for (int i = threadIdx.x; i < vectors; i += kThreads) memory.norm[i] = reinterpret_cast<const uint4*>(a.norm)[i];
  pdl_wait();     // w and norm are weights; the previous kernel wrote x and the addend
  pdl_trigger();  // comes late, since the next kernel's weight loads would delay this kernel's

  load_x(0);
  float r[kTiles] = {};  // 1 / root mean square of the lane's x rows
  const auto norm_x = [&](int block) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      if (const int v = vector_of(block, s); v < vectors)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) x[t][s] = normed(x[t][s], memory.norm[v], r[t]);
  };
  if (a.norm != nullptr) {
    float squares[kTiles] = {};
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      if (block > 0) load_x(block);
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) squares[t] = sum_of_squares(x[t][s], squares[t]);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      squares[t] = warp_sum<kLanesOfPiece>(squares[t]);
      if (lane % kLanesOfPiece == 0) memory.squares[warp][t][row] = squares[t];
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += memory.squares[i][t][row];
      r[t] = 1.0f / sqrtf(sum / static_cast<float>(a.in) + a.eps);
    }
    if (blocks == 1) norm_x(0);
  }

  // The y elements that this thread stores: for each kThreads-th of the tiles' sums a column in its half of the MMA
  // (swiglu: in the first half) and an x row.
  constexpr int kSums = kHalves * kQuarter, kOwn = (kTiles * kSums + kThreads - 1) / kThreads;
  const auto own = [](int j) { return static_cast<int>(threadIdx.x) + j * kThreads; };
  const auto own_row = [&](int j) { return own(j) / kSums * kEight + own(j) % kEight; };
  const auto own_column = [&](int j) {
    const int i = own(j) % kSums;
    return i % kQuarter / kEight + i / kQuarter * kEight;
  };
#pragma unroll 1
  for (int parity = 0; column < a.out; column += stride, parity ^= 1) {
    const auto stores = [&](int j) {
      return own_column(j) < width && column + own_column(j) < a.out && own_row(j) < a.rows && own(j) < kTiles * kSums;
    };
    float addend[kOwn] = {};
    if (a.addend != nullptr)
#pragma unroll
      for (int j = 0; j < kOwn; ++j)
        if (stores(j)) addend[j] = to_float(a.addend[own_row(j) * a.addend_stride + column + own_column(j)]);
    float sum[kTiles][2][4] = {};  // two accumulators, so that consecutive MMAs are independent
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      if (blocks > 1) {
        load_x(block);
        if (a.norm != nullptr) norm_x(block);
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 w0 = w[0][s], w1 = kHalves == 2 ? w[kHalves - 1][s] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          mma_m16n8k16(sum[t][0], {w0.x, w1.x, w0.y, w1.y}, x[t][s].x, x[t][s].y);
          mma_m16n8k16(sum[t][1], {w0.z, w1.z, w0.w, w1.w}, x[t][s].z, x[t][s].w);
        }
      }
      const bool last = block + 1 == blocks;
      load_w(last ? column + stride : column, last ? 0 : block + 1);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int h = 0; h < kHalves; ++h)  // the lane has column lane / 4, rows 2 (lane % 4) and + 1
        *reinterpret_cast<float2*>(&memory.sums[parity][warp][t][h * kQuarter + 2 * lane]) =
            make_float2(sum[t][0][2 * h] + sum[t][1][2 * h], sum[t][0][2 * h + 1] + sum[t][1][2 * h + 1]);
    __syncthreads();
    const auto sum_of_warps = [&](int i) {
      float all = 0;
#pragma unroll
      for (int j = 0; j < kWarps; ++j) all += memory.sums[parity][j][i / kSums][i % kSums];
      return all;
    };
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (!stores(j)) continue;
      float y = sum_of_warps(own(j)) + addend[j];
      if (activation != Activation::none) y = silu_of_rounded<bf16>(y);
      if (swiglu) y *= to_float(from_float<bf16>(sum_of_warps(own(j) + kQuarter)));
      a.y[own_row(j) * a.y_stride + column + own_column(j)] = from_float<bf16>(y);
    }
  }
}

// A CTA's columns of y.
template <int kHalves>
constexpr int width_of(Activation activation) {
  return activation == Activation::swiglu ? kEight : kEight * kHalves;
}

template <int kSteps, int kHalves, int kTiles = 1>
void launch_rows(Context& ctx, const SkinnyLinearArgs<bf16>& a, Activation activation) {
  const int64_t ctas = std::min<int64_t>(ceil_div(a.out, width_of<kHalves>(activation)),
                                         int64_t{ctx.num_sms} * kCtasPerSm<kSteps, kHalves, kTiles>);
  const size_t shared =
      sizeof(Memory<kHalves, kTiles>) + (a.norm != nullptr ? sizeof(bf16) * static_cast<size_t>(a.in) : 0);
  launch_pdl(ctx, "skinny_linear mma", skinny_linear_mma_kernel<kSteps, kHalves, kTiles>,
             dim3(static_cast<unsigned>(ctas)), dim3(kThreads), shared, a, activation);
}

constexpr int kShort = 3;  // steps
constexpr int kShortRow = kShort * kWarps * kLanesOfPiece * kEight;
template <int kTiles>
void launch_tiles(Context& ctx, const SkinnyLinearArgs<bf16>& a, Activation activation, bool halves) {
  halves ? launch_rows<kShort, 2, kTiles>(ctx, a, activation) : launch_rows<kShort, 1, kTiles>(ctx, a, activation);
}

}  // namespace

void launch_skinny_mma(Context& ctx, const SkinnyLinearArgs<bf16>& a, Activation activation) {
  const bool short_rows = a.in <= kShortRow,
             halves = activation == Activation::swiglu || a.out >= 2 * kEight * ctx.num_sms;
  if (short_rows && halves) return launch_rows<kShort, 2>(ctx, a, activation);
  if (short_rows) return launch_rows<kShort, 1>(ctx, a, activation);
  if (halves) return launch_rows<6, 2>(ctx, a, activation);
  launch_rows<12, 1>(ctx, a, activation);
}

static_assert(kMostRows == 8 * kEight);

bool launch_skinny_tiles(Context& ctx, const SkinnyLinearArgs<bf16>& a, Activation activation) {
  constexpr int kLongestRow = 4096;  // elements of x; rows of several blocks are read by every CTA
  constexpr int kEnoughCtas = 48;    // fewest CTAs with 16 columns each, whose rows of x come from L2
  const bool halves = activation == Activation::swiglu || a.out >= kEnoughCtas * 2 * kEight;
  const int columns = ceil_div(a.out, halves ? width_of<2>(activation) : width_of<1>(activation));
  if (a.in > kShortRow && (a.in > kLongestRow || columns > ctx.num_sms)) return false;
  if (a.rows <= 2 * kEight)
    launch_tiles<2>(ctx, a, activation, halves);
  else if (a.rows <= 4 * kEight)
    launch_tiles<4>(ctx, a, activation, halves);
  else if (a.rows <= kMostRows)
    launch_tiles<8>(ctx, a, activation, halves);
  else
    return false;
  return true;
}

}  // namespace triad::cuda
