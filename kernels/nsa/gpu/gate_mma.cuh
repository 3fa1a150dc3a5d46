// The gate MLP on tensor cores, for bf16 and dk 64 or 128: dk -> dk/2 -> 3 on the mean over a group's heads.
//
// The kernels are bound by reading q; the matrix products are small. Loads from q are therefore always in flight, and
// warps rarely synchronize. Backward also writes dq_group, in f32.
//
// A warp computes 8 rows at a time; a row is one token and group. The first product is fc1 [hidden][columns] times the
// transposed mean [columns][rows]: hidden units are the mma's M, rows its N, columns its K. Here and below, a lane is
// (a, c) = (lane / 4, lane % 4). In the B operand it holds row a. The columns may be in any order that is the same in
// both operands, so the lane holds columns 8 c .. 8 c + 7 in each 32, one 16-byte load. q is thus loaded directly into
// the registers in which it is summed over heads, with 6 KiB per warp in flight. fc1 is in shared memory in the A
// operand's order.
//
// Sums are fp32. A product's fp32 operand is split into two bf16, high + low, with a relative error of 2^-17, far below
// q's rounding. fc1 is bf16. fc1_b's and fc2's gradients are sums over fp32 values that are not split.
//
// Backward: d is the hidden layer's gradient before its activation, units by rows, in the first product's result
// registers. It is the A operand for fc1's gradient, d [units][rows] times mean [rows][columns], and, transposed by
// movmatrix, the B operand for dq. With dk = 64 each warp sums the whole of fc1's gradient in registers; with dk = 128
// each of four warps sums a quarter, over the rows of all four.
#pragma once
#include <algorithm>

#include "kernels/common/launch_pdl.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/nsa/gpu/gate.cuh"

namespace triad::cuda {

// Kernel sizes for head width kWidth. A row has kParts 32-column parts; lane 4 a + c loads columns 8 c .. 8 c + 7 in
// each part. As operands these are words, two bf16 each: in each part, word i has the columns 8 c + 2 i and 8 c + 2 i +
// 1.
template <int kWidth>
struct GateTiles {
  static constexpr int kHidden = kWidth / 2;
  static constexpr int kRows = 8;                      // rows (token, group) per warp at a time
  static constexpr int kParts = kWidth / 32;           // 16-byte vectors that a lane loads per row and head
  static constexpr int kUnits = kHidden / 8;           // hidden units per lane: 8 j + lane / 4, for j < kUnits
  static constexpr int kWords = kWidth / 8;            // words (column pairs) per lane and row
  static constexpr int kHeads = kWidth == 64 ? 6 : 2;  // heads per row whose loads are in flight together
  static constexpr int kForwardWarps = 4, kForwardCtasPerSm = 3;
  // Backward's CTAs iterate over the rows; each has a partial sum slice. kSharers: how many warps fc1's gradient is
  // divided among, by units; 1: each warp has its own gradient.
  static constexpr int kBackwardWarps = kWidth == 64 ? 8 : 4, kBackwardCtasPerSm = kWidth == 64 ? 1 : 2;
  static constexpr int kSharers = kWidth == 64 ? 1 : kBackwardWarps;
};

// Both layers' weights in shared memory, in the order in which the lanes read them.
template <int kWidth>
struct GateWeightsShared {
  using Tiles = GateTiles<kWidth>;
  uint4 fc1_w[Tiles::kUnits][Tiles::kParts][32];  // [j][part][lane]: the lane's 8 columns in unit 8 j + lane / 4
  float4 unit[Tiles::kHidden];                    // each hidden unit's fc1_b, and three fc2_w elements
  float fc2_b[4];

  // All loads are issued before the first store to shared memory, so that their latencies overlap.
  template <int kThreads>
  __device__ void load(const GateMlp<__nv_bfloat16>& mlp) {
    constexpr int kVectors = Tiles::kUnits * Tiles::kParts * 32, kOwn = kVectors / kThreads;
    static_assert(kVectors % kThreads == 0 && Tiles::kHidden <= kThreads);
    uint4 own[kOwn];
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int i = threadIdx.x + n * kThreads;
      const int to_lane = i % 32, part = i / 32 % Tiles::kParts, j = i / 32 / Tiles::kParts;
      own[n] = *reinterpret_cast<const uint4*>(mlp.fc1_w + (8 * j + to_lane / 4) * mlp.fc1_stride + 32 * part +
                                               to_lane % 4 * 8);
    }
    const int m = threadIdx.x % Tiles::kHidden, branch = threadIdx.x % 3;
    const __nv_bfloat16 small[5] = {mlp.fc1_b[m], mlp.fc2_w[m], mlp.fc2_w[mlp.fc2_stride + m],
                                    mlp.fc2_w[2 * mlp.fc2_stride + m], mlp.fc2_b[branch]};
#pragma unroll
    for (int n = 0; n < kOwn; ++n) (&fc1_w[0][0][0])[threadIdx.x + n * kThreads] = own[n];
    if (threadIdx.x < Tiles::kHidden)
      unit[m] = make_float4(to_float(small[0]), to_float(small[1]), to_float(small[2]), to_float(small[3]));
    if (threadIdx.x < 3) fc2_b[branch] = to_float(small[4]);
  }
};

// c[16x8] += a[16x8] b[8x8]
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(b));
}
// Transposes an 8x8 matrix, 16-bit elements, across a warp. Lane 4 a + c has row a, columns 2 c and 2 c + 1.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// Splits x0 and x1 each into two bf16, with a relative error of 2^-17: the pair `high` plus the pair `low`.
__device__ __forceinline__ void split_bf16(uint32_t& high, uint32_t& low, float x0, float x1) {
  high = pack_bf16(x0, x1);
  low = pack_bf16(x0 - __uint_as_float(high << 16), x1 - __uint_as_float(high & 0xffff0000u));
}

// q as the tensor-core kernels read it: a group's heads are contiguous, and all sequences' tokens have one stride. Row
// r is token r / groups, group r % groups; gate [3,count] and dq_group [count,dk] have the same rows.
struct DenseRows {
  const __nv_bfloat16* q;
  int64_t stride;          // token stride, in elements
  uint32_t count, groups;  // row count; groups per token
  int heads;               // query heads per group
};

// Reads a warp's rows, 8 (a tile) at a time, and sums q over the heads. In row a, lane 4 a + c sums columns 8 c .. 8 c
// + 7 in each 32-column part. The next kHeads heads' loads are always in flight.
template <int kWidth>
class HeadSums {
  static constexpr int kParts = GateTiles<kWidth>::kParts, kHeads = GateTiles<kWidth>::kHeads;

 public:
  // The 8-row tiles begin at rows first, first + step, ...
  __device__ HeadSums(const DenseRows& rows, uint32_t first, uint32_t step)
      : rows_(rows), row_(first + threadIdx.x % 32 / 4), step_(step) {
    find_row();
    request();
  }

  // Sums the next tile over all heads: sum[8 part + j] is column 32 part + 8 c + j in the lane's row, c = lane % 4.
  // Zeros past the last row.
  __device__ void next(float (&sum)[kWidth / 4]) {
#pragma unroll
    for (int j = 0; j < kWidth / 4; ++j) sum[j] = 0.0f;
    do {
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          float x[8];
          as_floats<__nv_bfloat16>(x, held_[h][part]);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[8 * part + j] += x[j];
        }
      head_ += kHeads;
      if (head_ >= rows_.heads) {
        head_ = 0, row_ += step_;
        find_row();
      }
      request();
    } while (head_ != 0);
  }

 private:
  __device__ void find_row() {
    const uint32_t token = row_ / rows_.groups, group = row_ % rows_.groups;
    from_ = row_ < rows_.count ? rows_.q + token * rows_.stride + group * rows_.heads * kWidth + threadIdx.x % 4 * 8
                               : nullptr;
  }
  __device__ void request() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        held_[h][part] = from_ != nullptr && head_ + h < rows_.heads
                             ? load_streamed(from_ + (head_ + h) * kWidth + 32 * part)
                             : make_uint4(0, 0, 0, 0);
  }

  const DenseRows& rows_;
  const __nv_bfloat16* from_;  // the lane's first column in q's row row_; nullptr past the last row
  uint32_t row_, step_;
  int head_ = 0;
  uint4 held_[kHeads][kParts];
};

// Multiplies the lane's sums over heads by `share` = 1 / heads, which gives the mean, and splits it into high and low
// words, two bf16 each.
template <int kWords>
__device__ __forceinline__ void split_mean(uint32_t (&high)[kWords], uint32_t (&low)[kWords],
                                           const float (&sum)[2 * kWords], float share) {
#pragma unroll
  for (int k = 0; k < kWords; ++k) split_bf16(high[k], low[k], sum[2 * k] * share, sum[2 * k + 1] * share);
}

// The first layer without its bias, before = fc1_w mean. Lane 4 a + c computes before[j][x], hidden unit 8 j + a for
// the tile's row 2 c + x.
template <int kWidth>
__device__ __forceinline__ void first_layer(float (&before)[kWidth / 16][2], const uint32_t (&high)[kWidth / 8],
                                            const uint32_t (&low)[kWidth / 8], const GateWeightsShared<kWidth>& w) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kWidth / 16; j += 2) {
    float d[4] = {};
#pragma unroll
    for (int part = 0; part < kWidth / 32; ++part) {
      const uint4 upper = w.fc1_w[j][part][lane], lower = w.fc1_w[j + 1][part][lane];
      const uint32_t a[2][4] = {{upper.x, lower.x, upper.y, lower.y}, {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int k = 4 * part + 2 * u;
        mma_m16n8k16(d, a[u], low[k], low[k + 1]);
        mma_m16n8k16(d, a[u], high[k], high[k + 1]);
      }
    }
    before[j][0] = d[0], before[j][1] = d[1], before[j + 1][0] = d[2], before[j + 1][1] = d[3];
  }
}

__device__ __forceinline__ float fast_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

template <int kWidth>
__global__ void __launch_bounds__(32 * GateTiles<kWidth>::kForwardWarps, GateTiles<kWidth>::kForwardCtasPerSm)
    gate_forward_mma_kernel(float* __restrict__ gate, DenseRows rows, GateMlp<__nv_bfloat16> weights, bool softmax,
                            float inverse_temperature) {
  using Tiles = GateTiles<kWidth>;
  __shared__ GateWeightsShared<kWidth> w;
  const int lane = threadIdx.x % 32, a = lane / 4, c = lane % 4;
  const uint32_t first = (blockIdx.x * Tiles::kForwardWarps + threadIdx.x / 32) * Tiles::kRows;
  const uint32_t step = gridDim.x * Tiles::kForwardWarps * Tiles::kRows;
  const float share = 1.0f / static_cast<float>(rows.heads);
  HeadSums<kWidth> heads(rows, first, step);
  w.template load<32 * Tiles::kForwardWarps>(weights);
  __syncthreads();
  for (uint32_t row = first; row < rows.count; row += step) {
    float sum[kWidth / 4], before[Tiles::kUnits][2];
    heads.next(sum);
    uint32_t high[Tiles::kWords], low[Tiles::kWords];
    split_mean(high, low, sum, share);
    first_layer(before, high, low, w);
    float z[2][3] = {};
#pragma unroll
    for (int j = 0; j < Tiles::kUnits; ++j) {
      const float4 unit = w.unit[8 * j + a];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float pre = before[j][x] + unit.x, after = pre * fast_sigmoid(pre);
        z[x][0] = fmaf(unit.y, after, z[x][0]);
        z[x][1] = fmaf(unit.z, after, z[x][1]);
        z[x][2] = fmaf(unit.w, after, z[x][2]);
      }
    }
    // Sums z over the 8 lanes with the same c, which have different units in rows 2 c and 2 c + 1. Lanes 16 and up get
    // row 2 c + 1's sums, the others row 2 c's.
    const bool odd = lane >= 16;
    float g[3];
#pragma unroll
    for (int b = 0; b < 3; ++b) {
      float sum_b = (odd ? z[1][b] : z[0][b]) + __shfl_xor_sync(kFullWarp, odd ? z[0][b] : z[1][b], 16);
      sum_b += __shfl_xor_sync(kFullWarp, sum_b, 8);
      sum_b += __shfl_xor_sync(kFullWarp, sum_b, 4);
      g[b] = (sum_b + w.fc2_b[b]) * inverse_temperature;
    }
    if (softmax) {
      const float top = fmaxf(g[0], fmaxf(g[1], g[2]));
#pragma unroll
      for (int b = 0; b < 3; ++b) g[b] = __expf(g[b] - top);
      const float total = 1.0f / (g[0] + g[1] + g[2]);
#pragma unroll
      for (int b = 0; b < 3; ++b) g[b] *= total;
    } else {
#pragma unroll
      for (int b = 0; b < 3; ++b) g[b] = fast_sigmoid(g[b]);
    }
    const int plane = a % 4;  // four lanes have the same row's gates; three of them store one each
    const uint32_t lane_row = row + 2 * c + odd;
    if (plane < 3 && lane_row < rows.count)
      gate[plane * int64_t{rows.count} + lane_row] = plane == 0 ? g[0] : plane == 1 ? g[1] : g[2];
  }
}

// The gradient dz at fc2's output for an 8-row tile, from the gates and their gradient. The constructor loads both,
// lane 8 b + r branch b in row first + r, so that a caller can load a tile ahead. Zeros past the last row.
class GateGradient {
 public:
  __device__ GateGradient(const float* dgate, const float* gate, const DenseRows& rows, uint32_t first) {
    const int lane = threadIdx.x % 32, b = lane / 8;
    const uint32_t row = first + lane % 8;
    const bool fetch = row < rows.count && b < 3;
    gate_ = fetch ? gate[b * int64_t{rows.count} + row] : 0.0f;
    dgate_ = fetch ? dgate[b * int64_t{rows.count} + row] : 0.0f;
  }
  // Computes dz[x][b], for the tile's row 2 c + x (c = lane % 4) and branch b.
  __device__ void get(float (&dz)[2][3], bool softmax, float inverse_temperature) const {
    const int lane = threadIdx.x % 32;
    const float product = gate_ * dgate_;
    float mean = 0.0f;
#pragma unroll
    for (int b = 0; b < 3; ++b) mean += __shfl_sync(kFullWarp, product, 8 * b + lane % 8);
    const float own = gate_ * (softmax ? dgate_ - mean : dgate_ * (1.0f - gate_)) * inverse_temperature;
#pragma unroll
    for (int x = 0; x < 2; ++x)
#pragma unroll
      for (int b = 0; b < 3; ++b) dz[x][b] = __shfl_sync(kFullWarp, own, 8 * b + 2 * (lane % 4) + x);
  }

 private:
  float gate_, dgate_;
};

// Backward's shared memory: the weights, fc1 transposed as the A operand for dq = fc1^T d, and operands that warps
// exchange. dq is computed in 16-column products t. Row 8 s + a in product t (s < 2, a < 8) is dq's column 32 (t / 2) +
// 4 a + 2 (t % 2) + s, so that a lane gets four neighbouring columns from two products and stores them together.
template <int kWidth>
struct GateBackwardShared {
  using Tiles = GateTiles<kWidth>;
  static constexpr int kColumnTiles = kWidth / 16, kUnitSteps = Tiles::kHidden / 16;
  // One warp's operands for fc1's gradient: each lane's words in d and in the transposed mean. Each fp32 value is split
  // in two bf16, so the uint2's x holds the high parts and its y the low parts.
  struct Operands {
    uint2 d[Tiles::kUnits][32], mean[Tiles::kWords][32];
  };
  GateWeightsShared<kWidth> w;
  uint4 fc1_turned[kColumnTiles][kUnitSteps][32];
  Operands operands[Tiles::kSharers == 1 ? 1 : 2][Tiles::kSharers];  // double-buffered

  __device__ void load(const GateMlp<__nv_bfloat16>& mlp) {
    w.template load<32 * Tiles::kBackwardWarps>(mlp);
    __syncthreads();
    const auto bits = reinterpret_cast<const uint16_t*>(w.fc1_w);
    uint32_t* const words = &fc1_turned[0][0][0].x;
    for (int i = threadIdx.x; i < kColumnTiles * kUnitSteps * 128; i += blockDim.x) {
      const int s = i % 2, half = i / 2 % 2, lane = i / 4 % 32, k = i / 128 % kUnitSteps, t = i / 128 / kUnitSteps;
      const int unit = 16 * k + 8 * half + lane % 4 * 2, column = 32 * (t / 2) + 4 * (lane / 4) + 2 * (t % 2) + s;
      // The index of (unit, column) among fc1_w's bf16 elements; the next unit is 4 lanes with 8 elements further.
      const int at = ((unit / 8 * Tiles::kParts + column / 32) * 32 + unit % 8 * 4 + column % 32 / 8) * 8 + column % 8;
      words[i] = bits[at] | uint32_t{bits[at + 4 * 8]} << 16;
    }
    __syncthreads();
  }
};

// Each warp's weight gradients, which backward adds over the warps at its end. Overlays GateBackwardShared.
template <int kWidth>
struct GateSums {
  using Tiles = GateTiles<kWidth>;
  static constexpr int kRow = kWidth + 2;  // padded: half a warp's lanes access different banks
  float fc1_w[Tiles::kBackwardWarps / Tiles::kSharers][Tiles::kHidden][kRow];
  float small[Tiles::kBackwardWarps][4 * Tiles::kHidden + 4];  // fc1_b, fc2_w and fc2_b gradients
};
template <int kWidth>
constexpr size_t kGateBackwardShared = std::max(sizeof(GateBackwardShared<kWidth>), sizeof(GateSums<kWidth>));

// Writes dq_group = fc1_w^T d / G for the 8 rows from `first` on; share = 1 / G. d, the hidden layer's gradient before
// its activation, is split into two bf16, high + low, and each part is a B operand: in row a, lane 4 a + c's word j
// holds hidden units 8 j + 2 c and 8 j + 2 c + 1.
template <int kWidth>
__device__ __forceinline__ void write_dq_group(float* dq_group, uint32_t first, uint32_t count,
                                               const uint32_t (&high)[kWidth / 16], const uint32_t (&low)[kWidth / 16],
                                               const GateBackwardShared<kWidth>& s, float share) {
  const int lane = threadIdx.x % 32, a = lane / 4, c = lane % 4;
#pragma unroll
  for (int t = 0; t < kWidth / 16; t += 2) {
    float d[2][4] = {};
#pragma unroll
    for (int k = 0; k < kWidth / 32; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 turned = s.fc1_turned[t + i][k][lane];
        const uint32_t fc1[4] = {turned.x, turned.y, turned.z, turned.w};
        mma_m16n8k16(d[i], fc1, low[2 * k], low[2 * k + 1]);
        mma_m16n8k16(d[i], fc1, high[2 * k], high[2 * k + 1]);
      }
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const uint32_t row = first + 2 * c + x;
      if (row < count)
        *reinterpret_cast<float4*>(dq_group + int64_t{row} * kWidth + 16 * t + 4 * a) =
            make_float4(d[0][x] * share, d[0][2 + x] * share, d[1][x] * share, d[1][2 + x] * share);
    }
  }
}

template <int kWidth>
__global__ void __launch_bounds__(32 * GateTiles<kWidth>::kBackwardWarps, GateTiles<kWidth>::kBackwardCtasPerSm)
    gate_backward_mma_kernel(float* __restrict__ dq_group, float* __restrict__ slices, const float* __restrict__ dgate,
                             const float* __restrict__ gate, DenseRows rows, GateMlp<__nv_bfloat16> weights,
                             bool softmax, float inverse_temperature) {
  using Tiles = GateTiles<kWidth>;
  constexpr int kUnits = Tiles::kUnits, kWords = Tiles::kWords, kSharers = Tiles::kSharers;
  constexpr int kOwnUnits = kUnits / kSharers;  // hidden units per lane for which this warp sums fc1's gradient
  auto& s = *reinterpret_cast<GateBackwardShared<kWidth>*>(dynamic_shared());
  const int lane = threadIdx.x % 32, a = lane / 4, c = lane % 4, warp = threadIdx.x / 32;
  const uint32_t step = gridDim.x * Tiles::kBackwardWarps * Tiles::kRows;
  const uint32_t first_of_cta = blockIdx.x * Tiles::kBackwardWarps * Tiles::kRows, offset = warp * Tiles::kRows;
  const float share = 1.0f / static_cast<float>(rows.heads);
  float fc1_sum[kOwnUnits / 2][kWords][4] = {}, fc1_b_sum[kUnits] = {}, fc2_sum[3][kUnits] = {}, dz_sum[3] = {};
  HeadSums<kWidth> heads(rows, first_of_cta + offset, step);
  GateGradient upstream(dgate, gate, rows, first_of_cta + offset);
  s.load(weights);

  int turn = 0;
  // All warps iterate equally often, since an iteration may contain a CTA barrier.
  for (uint32_t cta_row = first_of_cta; cta_row < rows.count; cta_row += step) {
    float sum[kWidth / 4], d[kUnits][2], dz[2][3];
    upstream.get(dz, softmax, inverse_temperature);
    heads.next(sum);
    upstream = GateGradient(dgate, gate, rows, cta_row + offset + step);
    uint32_t mean_high[kWords], mean_low[kWords], d_high[kUnits], d_low[kUnits];
    split_mean(mean_high, mean_low, sum, share);
    first_layer(d, mean_high, mean_low, s.w);
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      mean_high[k] = transpose_matrix(mean_high[k]), mean_low[k] = transpose_matrix(mean_low[k]);
      if constexpr (kSharers > 1) s.operands[turn][warp].mean[k][lane] = {mean_high[k], mean_low[k]};
    }
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const float4 unit = s.w.unit[8 * j + a];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float pre = d[j][x] + unit.x, sig = fast_sigmoid(pre), after = pre * sig;
        const float dafter = fmaf(dz[x][2], unit.w, fmaf(dz[x][1], unit.z, dz[x][0] * unit.y));
        d[j][x] = dafter * sig * fmaf(pre, 1.0f - sig, 1.0f);  // the gradient at the SiLU's input
        fc1_b_sum[j] += d[j][x];
#pragma unroll
        for (int b = 0; b < 3; ++b) fc2_sum[b][j] = fmaf(dz[x][b], after, fc2_sum[b][j]);
      }
      split_bf16(d_high[j], d_low[j], d[j][0], d[j][1]);
      if constexpr (kSharers > 1) s.operands[turn][warp].d[j][lane] = {d_high[j], d_low[j]};
    }
#pragma unroll
    for (int b = 0; b < 3; ++b) dz_sum[b] += dz[0][b] + dz[1][b];

    uint32_t turned_high[kUnits], turned_low[kUnits];
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
      turned_high[j] = transpose_matrix(d_high[j]), turned_low[j] = transpose_matrix(d_low[j]);
    write_dq_group<kWidth>(dq_group, cta_row + offset, rows.count, turned_high, turned_low, s, share);

    // Adds d times mean for two units (upper, lower). The product of both operands' low words is negligible.
    const auto add_product = [](float(&to)[4], uint2 upper, uint2 lower, uint2 mean) {
      mma_m16n8k8(to, upper.y, lower.y, mean.x);
      mma_m16n8k8(to, upper.x, lower.x, mean.y);
      mma_m16n8k8(to, upper.x, lower.x, mean.x);
    };
    if constexpr (kSharers == 1) {
#pragma unroll
      for (int j = 0; j < kUnits; j += 2)
#pragma unroll
        for (int k = 0; k < kWords; ++k)
          add_product(fc1_sum[j / 2][k], {d_high[j], d_low[j]}, {d_high[j + 1], d_low[j + 1]},
                      {mean_high[k], mean_low[k]});
    } else {
      __syncthreads();
      for (int other = 0; other < kSharers; ++other) {
        const auto& from = s.operands[turn][other];
#pragma unroll
        for (int j = 0; j < kOwnUnits; j += 2) {
          const uint2 upper = from.d[warp * kOwnUnits + j][lane], lower = from.d[warp * kOwnUnits + j + 1][lane];
#pragma unroll
          for (int k = 0; k < kWords; ++k) add_product(fc1_sum[j / 2][k], upper, lower, from.mean[k][lane]);
        }
      }
      turn ^= 1;
    }
  }

  pdl_trigger();
  __syncthreads();  // all warps have finished reading the weights
  auto& all = *reinterpret_cast<GateSums<kWidth>*>(&s);
#pragma unroll
  for (int j = 0; j < kOwnUnits; ++j)
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const int unit = 8 * (warp % kSharers * kOwnUnits + j) + a, column = 32 * (k / 4) + 8 * c + 2 * (k % 4);
      *reinterpret_cast<float2*>(&all.fc1_w[warp / kSharers][unit][column]) =
          make_float2(fc1_sum[j / 2][k][2 * (j % 2)], fc1_sum[j / 2][k][2 * (j % 2) + 1]);
    }
  float* const small = all.small[warp];
#pragma unroll
  for (int j = 0; j < kUnits; ++j) {
    const float sums[4] = {quad_sum(fc1_b_sum[j]), quad_sum(fc2_sum[0][j]), quad_sum(fc2_sum[1][j]),
                           quad_sum(fc2_sum[2][j])};
    small[c * Tiles::kHidden + 8 * j + a] = c == 0 ? sums[0] : c == 1 ? sums[1] : c == 2 ? sums[2] : sums[3];
  }
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    const float total = quad_sum(dz_sum[b]);
    if (lane == 0) small[4 * Tiles::kHidden + b] = total;
  }
  __syncthreads();
  // Gradient offsets in a slice. fc1_b's, fc2_w's and fc2_b's gradients are contiguous, so one loop stores them.
  const GateSlice offsets(weights);
  float* const slice = slices + blockIdx.x * static_cast<int64_t>(offsets.size);
  for (int i = threadIdx.x; i < Tiles::kHidden * kWidth; i += blockDim.x) {
    float total = all.fc1_w[0][i / kWidth][i % kWidth];
#pragma unroll
    for (int other = 1; other < Tiles::kBackwardWarps / kSharers; ++other)
      total += all.fc1_w[other][i / kWidth][i % kWidth];
    slice[i] = total;
  }
  for (int i = threadIdx.x; i < 4 * Tiles::kHidden + 3; i += blockDim.x) {
    float total = all.small[0][i];
    for (int other = 1; other < Tiles::kBackwardWarps; ++other) total += all.small[other][i];
    slice[offsets.fc1_b + i] = total;
  }
}

}  // namespace triad::cuda
