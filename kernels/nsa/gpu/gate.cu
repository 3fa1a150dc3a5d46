// The gate MLP on the GPU, forward and backward (nsa/gate.h has the formula; nsa/gpu/combine.cu has the gated sum). The
// kernels are bound by reading q.
//   bf16 with dk 64 or 128: tensor cores, nsa/gpu/gate_mma.cuh.
//   Any other shape: this file's kernels. A warp computes 4 rows at a time; a row is one token and group. It reads q's
//       G heads once and stores their mean to shared memory. Then each lane computes one hidden unit for all 4 rows, so
//       that each weight read from shared memory is used 4 times. fc1 is in shared memory in fp32, with rows padded to
//       an odd length: lanes read along or across rows without bank conflicts. If it does not fit (dk above 212 on
//       cards with 99 KiB per CTA), it is read from global memory.
//   Backward recomputes the hidden layer. Each CTA adds its 32-row tiles' weight gradients to its own scratch slice (4
//       x 4 elements of fc1's gradient per thread), and partials.cuh adds the slices in order.
#include <algorithm>
#include <limits>

#include "kernels/common/partials.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/nsa/gpu/gate_mma.cuh"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 4;                          // rows that a warp computes at a time
constexpr int64_t kSharedLimit = 160 * 1024;      // shared memory bytes per CTA, at most
constexpr int64_t kMinCtas = 64, kMaxCtas = 512;  // backward's CTAs, at least and at most
constexpr int64_t kSliceFloats = 2 << 20;  // most floats in all slices together, unless kMinCtas slices have more

// ---- the gate MLP ----

// The weights in shared memory, as floats, copied there by the constructor. fc1's rows are mlp.fc1_row() floats long:
// dk columns, zeros up to a multiple of 4, and one more float. Without kHoldsFc1, fc1's matrix stays in global memory.
template <class T, bool kHoldsFc1>
struct SharedMlp {
  const GateMlp<T>& global;
  float *fc1_w, *fc1_b, *fc2_w, *fc2_b;
  __device__ SharedMlp(float* shared, const GateMlp<T>& mlp)
      : global(mlp),
        fc1_w(shared),
        fc1_b(fc1_w + (kHoldsFc1 ? mlp.hidden * mlp.fc1_row() : 0)),
        fc2_w(fc1_b + mlp.hidden),
        fc2_b(fc2_w + 3 * mlp.hidden) {
    const int row = mlp.fc1_row();
    for (int i = threadIdx.x; kHoldsFc1 && i < mlp.hidden * row; i += blockDim.x)
      fc1_w[i] = i % row < mlp.width ? to_float(mlp.fc1_w[i / row * mlp.fc1_stride + i % row]) : 0.0f;
    for (int i = threadIdx.x; i < mlp.hidden; i += blockDim.x) fc1_b[i] = to_float(mlp.fc1_b[i]);
    for (int i = threadIdx.x; i < 3 * mlp.hidden; i += blockDim.x)
      fc2_w[i] = to_float(mlp.fc2_w[i / mlp.hidden * mlp.fc2_stride + i % mlp.hidden]);
    for (int i = threadIdx.x; i < 3; i += blockDim.x) fc2_b[i] = to_float(mlp.fc2_b[i]);
  }
  // Returns the weight for input k, less than padded_width(), in hidden unit m.
  __device__ __forceinline__ float fc1(int m, int k) const {
    if constexpr (kHoldsFc1)
      return fc1_w[m * global.fc1_row() + k];
    else
      return k < global.width ? to_float(global.fc1_w[m * global.fc1_stride + k]) : 0.0f;
  }
  // Shared memory floats, a multiple of 4.
  static __host__ __device__ int floats(const GateMlp<T>& mlp) {
    return kHoldsFc1 ? mlp.weight_floats() : mlp.weight_floats_without_fc1();
  }
};

// Averages q over the group's heads for the warp's rows first .. first + 3, into shared memory: mean[i * mean_stride +
// column] for row first + i. Zeros past the last row.
template <int V, class T>
__device__ void mean_of_heads(float* mean, int mean_stride, const Bthd<const T>& q, const GateRows& rows, int64_t first,
                              int width) {
  const int vectors = width / V;
  const float share = 1.0f / static_cast<float>(rows.heads);
  for (int i = threadIdx.x % 32; i < kRows * vectors; i += 32) {
    const int slot = i / vectors, column = i % vectors * V;
    float sum[V] = {};
    if (first + slot < rows.count) {
      const GateRows::Row row = rows.at(first + slot);
      const T* p = q.row(row.b, row.t, static_cast<int64_t>(row.g) * rows.heads) + column;
#pragma unroll 4
      for (int h = 0; h < rows.heads; ++h) {
        float head[V];
        load_vector<V>(head, p + h * q.stride_h);
#pragma unroll
        for (int j = 0; j < V; ++j) sum[j] += head[j];
      }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) mean[slot * mean_stride + column + j] = sum[j] * share;
  }
}

// Computes hidden unit m before its activation, for the warp's 4 rows: before[i] = fc1[m] . mean[i] + b1[m]. Each lane
// computes a different unit m.
template <class Mlp>
__device__ __forceinline__ void hidden_unit(float (&before)[kRows], const Mlp& mlp, const float* mean, int mean_stride,
                                            int m) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) before[i] = mlp.fc1_b[m];
  for (int k = 0; k < mean_stride; k += 4) {
    const float w0 = mlp.fc1(m, k), w1 = mlp.fc1(m, k + 1), w2 = mlp.fc1(m, k + 2), w3 = mlp.fc1(m, k + 3);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(mean + i * mean_stride + k);
      before[i] = fmaf(w0, x.x, fmaf(w1, x.y, fmaf(w2, x.z, fmaf(w3, x.w, before[i]))));
    }
  }
}

// Forward for any shape; a warp computes 4 rows at a time. Shared memory: the weights; per warp mean [4][padded width].
template <class T, int V, bool kHoldsFc1>
__global__ void __launch_bounds__(kThreads)
    gate_forward_kernel(Planes<float> gate, Bthd<const T> q, GateMlp<T> weights, GateRows rows, bool softmax,
                        float inverse_temperature) {
  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  using Mlp = SharedMlp<T, kHoldsFc1>;
  const Mlp mlp(shared, weights);
  const int width = weights.padded_width(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* const mean = shared + Mlp::floats(weights) + warp * kRows * width;
  for (int i = lane; i < kRows * width; i += 32) mean[i] = 0.0f;  // the padding columns stay 0
  __syncthreads();

  const int64_t rows_per_pass = int64_t{gridDim.x} * (blockDim.x / 32) * kRows;
  for (int64_t first = (int64_t{blockIdx.x} * (blockDim.x / 32) + warp) * kRows; first < rows.count;
       first += rows_per_pass) {
    mean_of_heads<V>(mean, width, q, rows, first, weights.width);
    __syncwarp();
    float z[kRows][3] = {};
    for (int m = lane; m < weights.hidden; m += 32) {
      float before[kRows];
      hidden_unit(before, mlp, mean, width, m);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float after = before[i] * sigmoid(before[i]);
#pragma unroll
        for (int b = 0; b < 3; ++b) z[i][b] = fmaf(mlp.fc2_w[b * weights.hidden + m], after, z[i][b]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int b = 0; b < 3; ++b) z[i][b] = (warp_sum(z[i][b]) + mlp.fc2_b[b]) * inverse_temperature;
      if (lane != i || first + i >= rows.count) continue;
      float g[3];
      if (softmax) {
        const float top = fmaxf(z[i][0], fmaxf(z[i][1], z[i][2]));
#pragma unroll
        for (int b = 0; b < 3; ++b) g[b] = expf(z[i][b] - top);
        const float total = g[0] + g[1] + g[2];
#pragma unroll
        for (int b = 0; b < 3; ++b) g[b] /= total;
      } else {
#pragma unroll
        for (int b = 0; b < 3; ++b) g[b] = sigmoid(z[i][b]);
      }
      const GateRows::Row row = rows.at(first + i);
#pragma unroll
      for (int b = 0; b < 3; ++b) gate.at(b, row.b, row.t, row.g) = g[b];
    }
    __syncwarp();  // all lanes have read the means before the next rows overwrite them
  }
}

// Writes the same three gates for every row, for GateOptions::force and uniform. One thread per row.
__global__ void __launch_bounds__(kThreads)
    gate_constant_kernel(Planes<float> gate, GateRows rows, float cmp, float sel, float win) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (r >= rows.count) return;
  const GateRows::Row row = rows.at(r);
  gate.at(0, row.b, row.t, row.g) = cmp;
  gate.at(1, row.b, row.t, row.g) = sel;
  gate.at(2, row.b, row.t, row.g) = win;
}

// The row tile that a CTA computes at a time in backward, in shared memory after the weights.
struct GateTile {
  float* mean;     // [rows][padded width]: q averaged over the group's heads
  float* after;    // [rows][padded hidden]: SiLU's output
  float* dbefore;  // [rows][padded hidden]: the gradient at the SiLU's input
  float* dz;       // [rows][4]: the gradient at fc2's output
  template <class T>
  __device__ GateTile(float* shared, const GateMlp<T>& mlp, int rows)
      : mean(shared),
        after(mean + rows * mlp.padded_width()),
        dbefore(after + rows * mlp.padded_hidden()),
        dz(dbefore + rows * mlp.padded_hidden()) {}
  template <class T>
  static int64_t floats(const GateMlp<T>& mlp, int64_t rows) {
    return rows * (mlp.padded_width() + 2 * mlp.padded_hidden() + 4);
  }
};

// Adds a tile's weight gradients to this CTA's partial sum slice; with `overwrite`, for the CTA's first tile, it
// overwrites the slice. An element is always written by the same thread, so there are no races.
template <class T>
__device__ void add_weight_gradients(float* slice, const GateTile& tile, const GateMlp<T>& mlp, int tile_rows,
                                     bool overwrite) {
  const int width = mlp.padded_width(), hidden = mlp.padded_hidden(), column_blocks = width / 4;
  for (int i = threadIdx.x; i < hidden / 4 * column_blocks; i += blockDim.x) {
    const int m = i / column_blocks * 4, k = i % column_blocks * 4;
    float sum[4][4] = {};
    for (int r = 0; r < tile_rows; ++r) {
      const float4 d = *reinterpret_cast<const float4*>(tile.dbefore + r * hidden + m);
      const float4 x = *reinterpret_cast<const float4*>(tile.mean + r * width + k);
      const float ds[4] = {d.x, d.y, d.z, d.w}, xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int a = 0; a < 4; ++a)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[a][c] = fmaf(ds[a], xs[c], sum[a][c]);
    }
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      float4& to = *reinterpret_cast<float4*>(slice + (m + a) * width + k);
      const float4 old = overwrite ? make_float4(0, 0, 0, 0) : to;
      to = make_float4(old.x + sum[a][0], old.y + sum[a][1], old.z + sum[a][2], old.w + sum[a][3]);
    }
  }
  // The few fc1_b, fc2_w and fc2_b gradients, assigned from the last thread downwards, since the last threads have less
  // work above.
  const GateSlice at(mlp);
  for (int i = at.fc1_b + blockDim.x - 1 - threadIdx.x; i < at.fc2_b + 3; i += blockDim.x) {
    float sum = 0;
    for (int r = 0; r < tile_rows; ++r) {
      if (i < at.fc2_w) {
        sum += tile.dbefore[r * hidden + i - at.fc1_b];
      } else if (i < at.fc2_b) {
        const int b = (i - at.fc2_w) / mlp.hidden, m = (i - at.fc2_w) % mlp.hidden;
        sum = fmaf(tile.dz[r * 4 + b], tile.after[r * hidden + m], sum);
      } else {
        sum += tile.dz[r * 4 + i - at.fc2_b];
      }
    }
    slice[i] = overwrite ? sum : slice[i] + sum;
  }
}

// Writes dq_group = fc1^T dbefore / G for the warp's 4 rows, which begin at row `first`: what each of the group's heads
// adds to its dq.
template <class Mlp>
__device__ void write_dq(const Bthd<float>& dq_group, const float* dbefore, const Mlp& mlp, int width,
                         int padded_hidden, int hidden, const GateRows& rows, int64_t first) {
  const int lane = threadIdx.x % 32;
  const float share = 1.0f / static_cast<float>(rows.heads);
  for (int k = lane; k < width; k += 32) {
    float sum[kRows] = {};
    for (int m = 0; m < hidden; ++m) {
      const float w = mlp.fc1(m, k);
#pragma unroll
      for (int i = 0; i < kRows; ++i) sum[i] = fmaf(w, dbefore[i * padded_hidden + m], sum[i]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i >= rows.count) break;
      const GateRows::Row row = rows.at(first + i);
      dq_group.row(row.b, row.t, row.g)[k] = sum[i] * share;
    }
  }
  __syncwarp();
}

// Backward for any shape: dq_group, and the CTA's partial sum slice for the weight gradients. Shared memory: the
// weights; a GateTile with 4 rows per warp. Four CTAs per SM hide q's read latency.
template <class T, int V, bool kHoldsFc1>
__global__ void __launch_bounds__(kThreads, 4)
    gate_backward_kernel(Bthd<float> dq_group, float* __restrict__ slices, Planes<const float> dgate,
                         Planes<const float> gate, Bthd<const T> q, GateMlp<T> weights, GateRows rows, bool softmax,
                         float inverse_temperature) {
  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  using Mlp = SharedMlp<T, kHoldsFc1>;
  const Mlp mlp(shared, weights);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile_rows = blockDim.x / 32 * kRows;
  const int width = weights.padded_width(), hidden = weights.padded_hidden();
  const GateTile tile(shared + Mlp::floats(weights), weights, tile_rows);
  for (int i = threadIdx.x; i < tile_rows * (width + 2 * hidden + 4); i += blockDim.x) tile.mean[i] = 0.0f;
  __syncthreads();  // the weights are loaded; the padding stays 0

  float* const mean = tile.mean + warp * kRows * width;
  float* const after = tile.after + warp * kRows * hidden;
  float* const dbefore = tile.dbefore + warp * kRows * hidden;
  float* const dz = tile.dz + warp * kRows * 4;
  float* const slice = slices + blockIdx.x * static_cast<int64_t>(GateSlice(weights).size);
  const int64_t tiles = ceil_div(rows.count, tile_rows);
  for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x) {
    const int64_t first = i * tile_rows + warp * kRows;
    mean_of_heads<V>(mean, width, q, rows, first, weights.width);
    if (lane < kRows) gate_dz(dz + lane * 4, dgate, gate, rows, first + lane, softmax, inverse_temperature);
    __syncwarp();
    for (int m = lane; m < weights.hidden; m += 32) {
      float before[kRows];
      hidden_unit(before, mlp, mean, width, m);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float s = sigmoid(before[r]);
        float dafter = 0;
#pragma unroll
        for (int b = 0; b < 3; ++b) dafter = fmaf(dz[r * 4 + b], mlp.fc2_w[b * weights.hidden + m], dafter);
        after[r * hidden + m] = before[r] * s;
        dbefore[r * hidden + m] = dafter * s * (1.0f + before[r] * (1.0f - s));
      }
    }
    __syncthreads();
    add_weight_gradients(slice, tile, weights, tile_rows, i == blockIdx.x);
    __syncthreads();  // now a warp accesses only its own rows in the tile
    write_dq(dq_group, dbefore, mlp, weights.width, hidden, weights.hidden, rows, first);
  }
}

GateRows gate_rows(const ConstTensor& q, const ConstTensor& gate) {
  const int64_t B = q.size(0), T = q.size(1), Hkv = gate.size(3);
  return {B * T * Hkv, T, static_cast<int>(Hkv), static_cast<int>(q.size(2) / Hkv)};
}

// If the tensor-core kernels support the problem, calls f.template operator()<dk>(rows as DenseRows) and returns true;
// else returns false. dense: whether the tensors other than q and the weights have the strides that they need.
template <class T, class F>
bool dispatch_mma(const GateRows& rows, const ConstTensor& q, const GateWeights& w, bool dense, F&& f) {
  if constexpr (!std::is_same_v<T, float>) {
    constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max() / 2;
    const bool one_stride = q.size(0) == 1 || q.stride[0] == q.size(1) * q.stride[1];
    if (!dense || !one_stride || q.stride[2] != q.size(3) || rows.count > kMostRows) return false;
    if (!all_have_vectors(kVector<T>, q, w.fc1_w)) return false;
    const DenseRows dense_rows{q.ptr<T>(), q.stride[1], static_cast<uint32_t>(rows.count),
                               static_cast<uint32_t>(rows.groups), rows.heads};
    if (q.size(3) == 64) return f.template operator()<64>(dense_rows), true;
    if (q.size(3) == 128) return f.template operator()<128>(dense_rows), true;
  }
  return false;
}

// The shared memory of a CTA, for the kernels for any shape.
struct GatePlan {
  bool holds_fc1;
  int warps;
  size_t bytes;
};
// Chooses the most warps per CTA, up to 8, whose rows fit in shared memory beside the weights. fc1's matrix is among
// these weights unless it leaves no room for even one warp. floats_of(warps): the rows' floats. Throws if nothing fits.
template <class T, class FloatsOf>
GatePlan plan_gate(const Context& ctx, const GateMlp<T>& mlp, FloatsOf&& floats_of) {
  const int64_t limit = std::min(kSharedLimit, shared_limits(ctx).cta_bytes);
  for (const bool holds_fc1 : {true, false})
    for (int warps = kThreads / 32; warps >= 1; warps /= 2) {
      const int64_t weights = holds_fc1 ? SharedMlp<T, true>::floats(mlp) : SharedMlp<T, false>::floats(mlp);
      const int64_t bytes = (weights + floats_of(warps)) * static_cast<int64_t>(sizeof(float));
      if (bytes <= limit) return {holds_fc1, warps, static_cast<size_t>(bytes)};
    }
  fail("nsa_gate: the gate MLP of d_k {} does not fit in {} bytes of shared memory", mlp.width, limit);
}

}  // namespace

void nsa_gate_forward(Context& ctx, Tensor gate, ConstTensor q, const GateWeights& w, const GateOptions& o) {
  const GateRows rows = gate_rows(q, gate);
  if (o.force != Branch::none || o.uniform) {
    float g[3] = {1.0f / 3.0f, 1.0f / 3.0f, 1.0f / 3.0f};
    if (o.force != Branch::none)
      for (int b = 0; b < 3; ++b) g[b] = b == static_cast<int>(o.force) ? 1.0f : 0.0f;
    return launch(ctx, "gate_constant", gate_constant_kernel, dim3(ceil_div(rows.count, kThreads)), kThreads, 0,
                  planes<float>(gate), rows, g[0], g[1], g[2]);
  }
  dispatch_gpu_float(q.dtype, [&]<class T>() {
    const GateMlp<T> mlp = gate_mlp<T>(w);
    const bool done = dispatch_mma<T>(rows, q, w, gate.contiguous(), [&]<int kWidth>(const DenseRows& dense_rows) {
      using Tiles = GateTiles<kWidth>;
      const int64_t ctas = std::min(ceil_div(rows.count, Tiles::kForwardWarps * Tiles::kRows),
                                    int64_t{Tiles::kForwardCtasPerSm} * ctx.num_sms);
      launch(ctx, "gate_forward", gate_forward_mma_kernel<kWidth>, dim3(ctas), 32 * Tiles::kForwardWarps, 0,
             gate.ptr<float>(), dense_rows, mlp, o.kind == GateKind::softmax, static_cast<float>(1.0 / o.temperature));
    });
    if (done) return;
    const auto floats_of = [&](int64_t warps) { return warps * kRows * mlp.padded_width(); };
    const GatePlan plan = plan_gate(ctx, mlp, floats_of);
    const int64_t ctas = std::min<int64_t>(ceil_div(rows.count, plan.warps * kRows), 4 * ctx.num_sms);
    const auto run = [&](auto kernel) {
      launch(ctx, "gate_forward", kernel, dim3(ctas), dim3(32 * plan.warps), plan.bytes, planes<float>(gate),
             bthd<T>(q), mlp, rows, o.kind == GateKind::softmax, static_cast<float>(1.0 / o.temperature));
    };
    if (!plan.holds_fc1) return run(gate_forward_kernel<T, 1, false>);
    dispatch_vector<T>(has_vectors(q, kVector<T>), [&]<int V>() { run(gate_forward_kernel<T, V, true>); });
  });
}

void nsa_gate_backward(Context& ctx, Tensor dq_group, const GateGrads& grads, ConstTensor dgate, ConstTensor gate,
                       ConstTensor q, const GateWeights& w, const GateOptions& o) {
  const GateRows rows = gate_rows(q, gate);
  if (rows.count == 0) return;
  dispatch_gpu_float(q.dtype, [&]<class T>() {
    const GateMlp<T> mlp = gate_mlp<T>(w);
    const auto floats_of = [&](int64_t warps) { return GateTile::floats(mlp, warps * kRows); };
    const GatePlan plan = plan_gate(ctx, mlp, floats_of);
    const GateSlice at(mlp);
    const int64_t ctas =
        std::min(ceil_div(rows.count, plan.warps * kRows), std::clamp(kSliceFloats / at.size, kMinCtas, kMaxCtas));
    const auto ctas_mma = [&]<class Tiles>(Tiles) {
      return std::min(ceil_div(rows.count, Tiles::kBackwardWarps * Tiles::kRows),
                      int64_t{Tiles::kBackwardCtasPerSm} * ctx.num_sms);
    };
    Scratch::Scope scope(ctx.scratch);  // large enough for any kernel's slices
    Tensor slices =
        scope.alloc(DType::f32, {std::max({ctas, ctas_mma(GateTiles<64>{}), ctas_mma(GateTiles<128>{})}), at.size});
    const bool softmax = o.kind == GateKind::softmax;
    const float inverse_temperature = static_cast<float>(1.0 / o.temperature);
    const bool dense = gate.contiguous() && dgate.contiguous() && dq_group.contiguous() && is_aligned(dq_group);
    const bool done = dispatch_mma<T>(rows, q, w, dense, [&]<int kWidth>(const DenseRows& dense_rows) {
      using Tiles = GateTiles<kWidth>;
      slices = slices.slice(0, 0, ctas_mma(Tiles{}));
      launch(ctx, "gate_backward", gate_backward_mma_kernel<kWidth>, dim3(slices.size(0)), 32 * Tiles::kBackwardWarps,
             kGateBackwardShared<kWidth>, dq_group.ptr<float>(), slices.ptr<float>(), dgate.ptr<float>(),
             gate.ptr<float>(), dense_rows, mlp, softmax, inverse_temperature);
    });
    if (!done) {
      slices = slices.slice(0, 0, ctas);
      const auto run = [&](auto kernel) {
        launch(ctx, "gate_backward", kernel, dim3(ctas), dim3(32 * plan.warps), plan.bytes, bthd<float>(dq_group),
               slices.ptr<float>(), planes<const float>(dgate), planes<const float>(gate), bthd<T>(q), mlp, rows,
               softmax, inverse_temperature);
      };
      if (plan.holds_fc1)
        dispatch_vector<T>(has_vectors(q, kVector<T>), [&]<int V>() { run(gate_backward_kernel<T, V, true>); });
      else
        run(gate_backward_kernel<T, 1, false>);
    }
    add_partials(ctx, slices,
                 {{grads.fc1_w, 0, mlp.padded_width()},
                  {grads.fc1_b, at.fc1_b, 0},
                  {grads.fc2_w, at.fc2_w, mlp.hidden},
                  {grads.fc2_b, at.fc2_b, 0}});
  });
}

}  // namespace triad::cuda
