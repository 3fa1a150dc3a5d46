// The gate's MLP on tensor cores, for bf16 and dk of 64 or 128: dk -> dk/2 -> 3 on the mean of a group's heads. Its
// products are small (128 FLOP a byte of q at dk 64 would still be memory's); what counts is that a warp has much of q
// in flight and few instructions between. Bytes at M7C, 32,768 tokens: forward 50 MB (q), backward 67 MB (q, and f32 of
// dq for each group).
//   A warp takes 16 rows (token, group), which are the M of m16n8k16. q comes by cp.async; a lane adds up over heads
//   the 16-byte vectors that are its part of the A operand: columns come in slots of an order that makes this so
//   (below), and fc1 lies in shared memory in that order. Sums stay fp32: what enters a product is split into two bf16,
//   high + low, which carry 16 bits of the mantissa (the rest, 2^-17, is far below the rounding of q itself); fc1 is
//   bf16 as it is. The gradients of fc2_b are sums of unsplit fp32.
//   Backward keeps the 64 rows of a CTA, split means and split gradients, in shared memory: each warp then owns a part
//   of fc1's gradient, which it sums in registers over all of the CTA's tiles. Small gradients (fc1_b, fc2) are summed
//   over the warp's rows by a reduce-scatter of shuffles.
// Measured on one H200 in a step at M7C, 16 x 2048: 24 us forward, 32 backward, of floors 12 and 16. It is the chain of
// a warp's steps that takes the time, not the bytes: 12 KiB of q a warp under way, with half the warps, took 26 and 41.
#pragma once
#include "kernels/nsa_gate.cuh"
#include "kernels/ptx.cuh"

namespace triad::cuda {

// Slots: position 16 s + 8 v + 2 c + x of a row holds column 32 (s / 2) + 8 c + 4 (s % 2) + 2 v + x. So lane c of a
// quad, whose A operand of step s is the slots 2c, 2c + 1 of both halves v, holds columns 8c .. 8c + 7 of each 32.
template <int kWidth>
struct GateTiles {
  static constexpr int kHidden = kWidth / 2;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kWarps;
  static constexpr int kParts = kWidth / 32;  // vectors of a lane in a row
  static constexpr int kWidthStride = kWidth + 8,
                       kHiddenStride = kHidden + 8;  // of rows in shared memory: no conflicts
  static constexpr int kMTiles = kHidden / 16, kNTiles = kWidth / 8 * kMTiles / kWarps;  // of fc1's gradient, a warp's
  static_assert(kMTiles <= kWarps);
  // They stay, in backward each with a slice. As many as fit: a warp's steps wait for each other, so it takes others.
  static constexpr int kForwardCtasPerSm = kWidth == 64 ? 6 : 4, kBackwardCtasPerSm = kWidth == 64 ? 4 : 2;
};

template <int kWidth>
struct GateWeightsShared {
  using Tiles = GateTiles<kWidth>;
  alignas(16) __nv_bfloat16 fc1_w[Tiles::kHidden * Tiles::kWidthStride];  // slots
  float4 unit[Tiles::kHidden];                                            // fc1_b, and what fc2 makes of the unit
  float fc2_b[4];

  __device__ void load(const GateMlp<__nv_bfloat16>& mlp) {
    constexpr int kWords = kWidth / 2;  // pairs of columns
    for (int i = threadIdx.x; i < Tiles::kHidden * kWords; i += blockDim.x) {
      const int m = i / kWords, word = i % kWords, part = word / 16, c = word / 4 % 4, u = word / 2 % 2, v = word % 2;
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(mlp.fc1_w + m * mlp.fc1_stride + 2 * word);
      *reinterpret_cast<uint32_t*>(&fc1_w[m * Tiles::kWidthStride + 32 * part + 16 * u + 8 * v + 2 * c]) = pair;
    }
    for (int i = threadIdx.x; i < Tiles::kHidden; i += blockDim.x)
      unit[i] = make_float4(to_float(mlp.fc1_b[i]), to_float(mlp.fc2_w[i]), to_float(mlp.fc2_w[mlp.fc2_stride + i]),
                            to_float(mlp.fc2_w[2 * mlp.fc2_stride + i]));
    if (threadIdx.x < 3) fc2_b[threadIdx.x] = to_float(mlp.fc2_b[threadIdx.x]);
  }
};

// x = high + low, two bf16, to 2^-17.
__device__ __forceinline__ void split_bf16(uint32_t& high, uint32_t& low, float x0, float x1) {
  high = pack_bf16(x0, x1);
  low = pack_bf16(x0 - __uint_as_float(high << 16), x1 - __uint_as_float(high & 0xffff0000u));
}

// What this route asks for: a group's heads side by side, all tokens one stride apart, planes dense. So a row is a
// number.
struct DenseRows {
  const __nv_bfloat16* q;
  int64_t stride;  // of tokens
  uint32_t count, groups;
  int heads;
};

// The row that a lane's fragments belong to, for i = 0; 8 further on for i = 1.
__device__ __forceinline__ uint32_t lane_row(uint32_t first, int i) { return first + threadIdx.x % 32 / 4 + 8 * i; }

// A warp's way to its rows of q: 256 bytes of heads of all 16 rows at a time come by cp.async into a buffer, which is
// asked for again as soon as it has been added up. So 4 KiB are under way while the warp computes, more than
// its registers could hold.
template <int kWidth>
class HeadStream {
 public:
  static constexpr int kHeads = 128 / kWidth, kStride = 128 + 32;  // elements; rows end 64 bytes apart: no conflicts
  struct Buffer {
    alignas(16) __nv_bfloat16 rows[16 * kStride];
  };

  // Of the tiles of 16 rows that begin at first, first + step, ...
  __device__ HeadStream(Buffer& buffer, const DenseRows& rows, uint32_t first, uint32_t step)
      : buffer_(buffer), rows_(rows), row_(first), step_(step) {
    find_rows();
    request();
  }

  // Of the next tile: sum[i][8 part + j] = column 32 part + 8 c + j of the lane's row i, over all heads.
  __device__ void next(float (&sum)[2][kWidth / 4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kWidth / 4; ++j) sum[i][j] = 0.0f;
    for (int first = 0; first < rows_.heads; first += kHeads) {
      copy_async_wait();
      __syncwarp();
      const __nv_bfloat16* from = buffer_.rows + lane() / 4 * kStride + lane() % 4 * 8;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (first + h >= rows_.heads) break;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int part = 0; part < kWidth / 32; ++part) {
            float x[8];
            load_vector<8>(x, from + 8 * i * kStride + h * kWidth + 32 * part);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[i][8 * part + j] += x[j];
          }
      }
      __syncwarp();
      request();
    }
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ void find_rows() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = lane_row(row_, i), token = row / rows_.groups, group = row % rows_.groups;
      heads_[i] = row < rows_.count ? rows_.q + token * rows_.stride + group * rows_.heads * kWidth : nullptr;
    }
  }
  // Half a warp a row, 16 bytes a lane; zeros past the last row.
  __device__ void request() {
    if (row_ >= rows_.count) return;
    const int element = lane() % 16 * 8;
    const bool is_head = head_ + element / kWidth < rows_.heads;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int row = 2 * k + lane() / 16;
      const auto address = __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(heads_[k / 4]), row % 8 * 4);
      const auto from = reinterpret_cast<const __nv_bfloat16*>(address);
      if (is_head)
        copy_async_16(&buffer_.rows[row * kStride + element],
                      from != nullptr ? from + head_ * kWidth + element : rows_.q, from != nullptr ? 16 : 0);
    }
    head_ += kHeads;
    if (head_ < rows_.heads) return;
    head_ = 0, row_ += step_;
    find_rows();
  }

  Buffer& buffer_;
  const DenseRows& rows_;
  const __nv_bfloat16* heads_[2];  // of the tile that is asked for next; null past the last row
  uint32_t row_, step_;
  int head_ = 0;
};

// The A operands of the two steps that columns 32 part .. 32 part + 31 make, of what HeadStream gave: split.
template <int kWidth>
__device__ __forceinline__ void split_part(uint32_t (&high)[2][4], uint32_t (&low)[2][4], int part,
                                           const float (&sum)[2][kWidth / 4], float share) {
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int v = 0; v < 2; ++v)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = 8 * part + 4 * u + 2 * v;
        split_bf16(high[u][2 * v + i], low[u][2 * v + i], sum[i][j] * share, sum[i][j + 1] * share);
      }
}

// before += fc1 . mean for the two steps of a part; C fragments: hidden unit 8 n + 2 c + x, rows as in LaneRows.
template <int kWidth>
__device__ __forceinline__ void first_layer(float (&before)[kWidth / 16][4], const uint32_t (&high)[2][4],
                                            const uint32_t (&low)[2][4], int part, const GateWeightsShared<kWidth>& w) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int n = 0; n < kWidth / 16; n += 2) {
      uint32_t b[4];
      load_matrices(b, &w.fc1_w[(8 * n + lane / 16 * 8 + lane % 8) * GateTiles<kWidth>::kWidthStride + 32 * part +
                                16 * u + lane / 8 % 2 * 8]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_m16n8k16(before[n + i], low[u], b[2 * i], b[2 * i + 1]);
        mma_m16n8k16(before[n + i], high[u], b[2 * i], b[2 * i + 1]);
      }
    }
}

__device__ __forceinline__ float fast_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
// Over the lanes 4 i .. 4 i + 3.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <int kWidth>
struct GateForwardShared {
  typename HeadStream<kWidth>::Buffer q[GateTiles<kWidth>::kWarps];
  GateWeightsShared<kWidth> w;
};

template <int kWidth>
__global__ void __launch_bounds__(GateTiles<kWidth>::kThreads, GateTiles<kWidth>::kForwardCtasPerSm)
    gate_forward_mma_kernel(float* __restrict__ gate, DenseRows rows, GateMlp<__nv_bfloat16> weights, bool softmax,
                            float inverse_temperature) {
  using Tiles = GateTiles<kWidth>;
  auto& s = *reinterpret_cast<GateForwardShared<kWidth>*>(dynamic_shared());
  const int c = threadIdx.x % 4, warp = threadIdx.x / 32;
  const uint32_t first = (blockIdx.x * Tiles::kWarps + warp) * 16, step = gridDim.x * Tiles::kRows;
  const float share = 1.0f / static_cast<float>(rows.heads);
  HeadStream<kWidth> heads(s.q[warp], rows, first, step);
  s.w.load(weights);
  __syncthreads();
  for (uint32_t row = first; row < rows.count; row += step) {
    float sum[2][kWidth / 4], before[kWidth / 16][4] = {};
    heads.next(sum);
#pragma unroll
    for (int part = 0; part < Tiles::kParts; ++part) {
      uint32_t high[2][4], low[2][4];
      split_part<kWidth>(high, low, part, sum, share);
      first_layer(before, high, low, part, s.w);
    }
    float z[2][3] = {};
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n)
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int m = 8 * n + 2 * c + x;
        const float4 unit = s.w.unit[m];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float pre = before[n][2 * i + x] + unit.x, after = pre * fast_sigmoid(pre);
          z[i][0] = fmaf(unit.y, after, z[i][0]);
          z[i][1] = fmaf(unit.z, after, z[i][1]);
          z[i][2] = fmaf(unit.w, after, z[i][2]);
        }
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int b = 0; b < 3; ++b) z[i][b] = (quad_sum(z[i][b]) + s.w.fc2_b[b]) * inverse_temperature;
      float g[3];
      if (softmax) {
        const float top = fmaxf(z[i][0], fmaxf(z[i][1], z[i][2]));
#pragma unroll
        for (int b = 0; b < 3; ++b) g[b] = __expf(z[i][b] - top);
        const float total = 1.0f / (g[0] + g[1] + g[2]);
#pragma unroll
        for (int b = 0; b < 3; ++b) g[b] *= total;
      } else {
#pragma unroll
        for (int b = 0; b < 3; ++b) g[b] = fast_sigmoid(z[i][b]);
      }
      const uint32_t lane_at = lane_row(row, i);
      if (c < 3 && lane_at < rows.count) gate[c * int64_t{rows.count} + lane_at] = c == 0 ? g[0] : c == 1 ? g[1] : g[2];
    }
  }
}

// What backward keeps of a CTA's rows, high and low.
template <int kWidth>
struct GateBackwardShared {
  using Tiles = GateTiles<kWidth>;
  typename HeadStream<kWidth>::Buffer q[Tiles::kWarps];
  GateWeightsShared<kWidth> w;
  alignas(16) __nv_bfloat16 mean[2][Tiles::kRows * Tiles::kWidthStride];      // slots
  alignas(16) __nv_bfloat16 dbefore[2][Tiles::kRows * Tiles::kHiddenStride];  // gradient before the SiLU
};
// At the end, in the place of the means: each warp's sums of fc1_b's, fc2_w's and fc2_b's gradient.
template <int kWidth>
struct GateSmallSums {
  float hidden[GateTiles<kWidth>::kWarps][4][GateTiles<kWidth>::kHidden], dz[GateTiles<kWidth>::kWarps][3];
};

// Of v[2 kHalf], summed over two lanes that differ in kBit: the lane with the bit keeps the upper half, in v[0 ..
// kHalf).
template <int kBit, int kHalf>
__device__ __forceinline__ void fold(float (&v)[32]) {
  const bool upper = threadIdx.x & kBit;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float give = upper ? v[i] : v[i + kHalf], keep = upper ? v[i + kHalf] : v[i];
    v[i] = keep + __shfl_xor_sync(0xffffffffu, give, kBit);
  }
}
// Gradient of fc2's result for the lane's rows, from those of the gates: lane c of a quad fetches branch c, early, and
// all get all three. Zeros past the last row, and with them all that follows.
class GateGradient {
 public:
  __device__ GateGradient(const float* dgate, const float* gate, const DenseRows& rows, uint32_t first) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = lane_row(first, i);
      const bool fetch = row < rows.count && c < 3;
      gate_[i] = fetch ? gate[c * int64_t{rows.count} + row] : 0.0f;
      dgate_[i] = fetch ? dgate[c * int64_t{rows.count} + row] : 0.0f;
    }
  }
  __device__ void get(float (&dz)[2][3], bool softmax, float inverse_temperature) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float mean = quad_sum(gate_[i] * dgate_[i]);
      const float own = gate_[i] * (softmax ? dgate_[i] - mean : dgate_[i] * (1.0f - gate_[i])) * inverse_temperature;
#pragma unroll
      for (int b = 0; b < 3; ++b) dz[i][b] = __shfl_sync(0xffffffffu, own, b, 4);
    }
  }

 private:
  float gate_[2], dgate_[2];
};

// sums += v summed over the 8 lanes of a column (lane % 4): lane / 4 = i gets v[4 i ..].
__device__ __forceinline__ void add_reduced(float (&sums)[4], float (&v)[32]) {
  fold<16, 16>(v);
  fold<8, 8>(v);
  fold<4, 4>(v);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += v[i];
}

// dq of a group = fc1^T dbefore / G; C fragments are slots, of which a lane has 8 columns side by side in each 32.
template <int kWidth>
__device__ __forceinline__ void write_dq_group(float* dq_group, uint32_t row, uint32_t count,
                                               const uint32_t (&high)[kWidth / 32][4],
                                               const uint32_t (&low)[kWidth / 32][4],
                                               const GateWeightsShared<kWidth>& w, float share) {
  const int lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll
  for (int part = 0; part < kWidth / 32; ++part) {
    float d[4][4] = {};
#pragma unroll
    for (int s = 0; s < kWidth / 32; ++s)
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, &w.fc1_w[(16 * s + lane / 8 % 2 * 8 + lane % 8) * GateTiles<kWidth>::kWidthStride +
                                             32 * part + 8 * n + lane / 16 * 8]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_m16n8k16(d[n + i], low[s], b[2 * i], b[2 * i + 1]);
          mma_m16n8k16(d[n + i], high[s], b[2 * i], b[2 * i + 1]);
        }
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (lane_row(row, i) >= count) continue;
      float columns[8];
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x) columns[2 * n + x] = d[n][2 * i + x] * share;
      store_vector<8>(dq_group + int64_t{lane_row(row, i)} * kWidth + 32 * part + 8 * c, columns);
    }
  }
}

// Adds the CTA's rows to the warp's part of fc1's gradient: hidden units 16 m_tile .., slots 8 n_tile0 ...
template <int kWidth>
__device__ __forceinline__ void add_fc1_gradient(float (&sum)[GateTiles<kWidth>::kNTiles][4],
                                                 const GateBackwardShared<kWidth>& s, int m_tile, int n_tile0) {
  using Tiles = GateTiles<kWidth>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Tiles::kRows; k += 16) {
    uint32_t a[2][4];
#pragma unroll
    for (int part = 0; part < 2; ++part)
      load_matrices_transposed(
          a[part],
          &s.dbefore[part][(k + lane / 16 * 8 + lane % 8) * Tiles::kHiddenStride + 16 * m_tile + lane / 8 % 2 * 8]);
#pragma unroll
    for (int n = 0; n < Tiles::kNTiles; n += 2) {
      uint32_t b[2][4];
#pragma unroll
      for (int part = 0; part < 2; ++part)
        load_matrices_transposed(
            b[part],
            &s.mean[part][(k + lane / 8 % 2 * 8 + lane % 8) * Tiles::kWidthStride + 8 * (n_tile0 + n) + lane / 16 * 8]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_m16n8k16(sum[n + i], a[1], b[0][2 * i], b[0][2 * i + 1]);
        mma_m16n8k16(sum[n + i], a[0], b[1][2 * i], b[1][2 * i + 1]);
        mma_m16n8k16(sum[n + i], a[0], b[0][2 * i], b[0][2 * i + 1]);
      }
    }
  }
}

template <int kWidth>
__global__ void __launch_bounds__(GateTiles<kWidth>::kThreads, GateTiles<kWidth>::kBackwardCtasPerSm)
    gate_backward_mma_kernel(float* __restrict__ dq_group, float* __restrict__ slices, const float* __restrict__ dgate,
                             const float* __restrict__ gate, DenseRows rows, GateMlp<__nv_bfloat16> weights,
                             bool softmax, float inverse_temperature) {
  using Tiles = GateTiles<kWidth>;
  constexpr int kHidden = Tiles::kHidden;
  auto& s = *reinterpret_cast<GateBackwardShared<kWidth>*>(dynamic_shared());
  const int lane = threadIdx.x % 32, c = lane % 4, warp = threadIdx.x / 32;
  const int row_in_cta = warp * 16 + lane / 4;  // and 8 further on
  const int m_tile = warp % Tiles::kMTiles, n_tile0 = warp / Tiles::kMTiles * Tiles::kNTiles;
  const float share = 1.0f / static_cast<float>(rows.heads);
  float fc1_sum[Tiles::kNTiles][4] = {}, small_sum[kHidden / 32][4] = {}, dz_sum[3] = {};
  const uint32_t first = (blockIdx.x * Tiles::kWarps + warp) * 16, step = gridDim.x * Tiles::kRows;
  HeadStream<kWidth> heads(s.q[warp], rows, first, step);
  GateGradient upstream(dgate, gate, rows, first);
  s.w.load(weights);

  const uint32_t tiles = static_cast<uint32_t>(ceil_div(rows.count, Tiles::kRows));
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint32_t row = tile * Tiles::kRows + warp * 16;  // past the last one too: a CTA's warps stay together
    float sum[2][kWidth / 4] = {}, before[kWidth / 16][4] = {}, dz[2][3];
    upstream.get(dz, softmax, inverse_temperature);
    if (row < rows.count) heads.next(sum);
    upstream = GateGradient(dgate, gate, rows, row + step);
    __syncthreads();  // the weights are there; the tile before is no longer read
#pragma unroll
    for (int part = 0; part < Tiles::kParts; ++part) {
      uint32_t high[2][4], low[2][4];
      split_part<kWidth>(high, low, part, sum, share);
      first_layer(before, high, low, part, s.w);
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int v = 0; v < 2; ++v)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int place = (row_in_cta + 8 * i) * Tiles::kWidthStride + 32 * part + 16 * u + 8 * v + 2 * c;
            *reinterpret_cast<uint32_t*>(&s.mean[0][place]) = high[u][2 * v + i];
            *reinterpret_cast<uint32_t*>(&s.mean[1][place]) = low[u][2 * v + i];
          }
    }
    // C fragments of two hidden tiles are the A operand of one step of 16.
    uint32_t high[kWidth / 32][4], low[kWidth / 32][4];
    float small[32];  // of 4 n: fc1_b's, then fc2_w's three, 8 hidden units of this lane each
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      float d[2][2];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int m = 8 * n + 2 * c + x;
        const float4 unit = s.w.unit[m];
        float after[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float pre = before[n][2 * i + x] + unit.x, sig = fast_sigmoid(pre);
          const float dafter = fmaf(dz[i][2], unit.w, fmaf(dz[i][1], unit.z, dz[i][0] * unit.y));
          after[i] = pre * sig;
          d[i][x] = dafter * sig * fmaf(pre, 1.0f - sig, 1.0f);
        }
        small[2 * (n % 4) + x] = d[0][x] + d[1][x];
#pragma unroll
        for (int b = 0; b < 3; ++b)
          small[8 * (b + 1) + 2 * (n % 4) + x] = fmaf(dz[0][b], after[0], dz[1][b] * after[1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t &h = high[n / 2][n % 2 * 2 + i], &l = low[n / 2][n % 2 * 2 + i];
        split_bf16(h, l, d[i][0], d[i][1]);
        const int place = (row_in_cta + 8 * i) * Tiles::kHiddenStride + 8 * n + 2 * c;
        *reinterpret_cast<uint32_t*>(&s.dbefore[0][place]) = h;
        *reinterpret_cast<uint32_t*>(&s.dbefore[1][place]) = l;
      }
      if (n % 4 == 3) add_reduced(small_sum[n / 4], small);
    }
#pragma unroll
    for (int b = 0; b < 3; ++b) dz_sum[b] += dz[0][b] + dz[1][b];
    write_dq_group<kWidth>(dq_group, row, rows.count, high, low, s.w, share);
    __syncthreads();
    add_fc1_gradient<kWidth>(fc1_sum, s, m_tile, n_tile0);
  }

  float* const slice = slices + blockIdx.x * static_cast<int64_t>(GateSlice(weights).size);
#pragma unroll
  for (int n = 0; n < Tiles::kNTiles; ++n) {
    const int tile = n_tile0 + n, column = tile / 4 * 32 + 8 * c + tile % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float2*>(slice + (16 * m_tile + lane / 4 + 8 * i) * kWidth + column) =
          make_float2(fc1_sum[n][2 * i], fc1_sum[n][2 * i + 1]);
  }
  __syncthreads();
  auto& all = *reinterpret_cast<GateSmallSums<kWidth>*>(&s.mean);
  static_assert(sizeof(all) <= sizeof(s.mean));
#pragma unroll
  for (int n = 0; n < kHidden / 32; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = lane / 4 * 4 + i, unit = e % 8;  // of small[32]
      all.hidden[warp][e / 8][32 * n + unit / 2 * 8 + 2 * c + unit % 2] = small_sum[n][i];
    }
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    const float sum = warp_sum(c == 0 ? dz_sum[b] : 0.0f);
    if (lane == 0) all.dz[warp][b] = sum;
  }
  __syncthreads();
  const GateSlice place(weights);
  for (int i = threadIdx.x; i < 4 * kHidden; i += Tiles::kThreads) {  // fc1_b and fc2_w lie side by side
    float sum = all.hidden[0][i / kHidden][i % kHidden];
    for (int other = 1; other < Tiles::kWarps; ++other) sum += all.hidden[other][i / kHidden][i % kHidden];
    slice[place.fc1_b + i] = sum;
  }
  if (threadIdx.x < 3) {
    float sum = all.dz[0][threadIdx.x];
    for (int other = 1; other < Tiles::kWarps; ++other) sum += all.dz[other][threadIdx.x];
    slice[place.fc2_b + threadIdx.x] = sum;
  }
}

}  // namespace triad::cuda
