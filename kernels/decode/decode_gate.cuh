// The gate of a (sequence, group) in a decoding kernel, computed by one CTA: one forced branch, uniform, or an MLP on
// the group's mean query.
#pragma once
#include "kernels/decode/decode.cuh"
#include "kernels/nsa/gpu/gate.cuh"

namespace triad::cuda {

// force: index of the branch whose gate is 1, the others' being 0; -1: none is forced.
struct GateKernelOptions {
  int force = 0;
  bool uniform = false, softmax = false;
  float inverse_temperature = 1;
  __host__ __device__ bool computed() const { return force < 0 && !uniform; }
};

// The gate's shared memory: the MLP's weights, the mean query and the hidden layer. Without kHoldsFc1, for cards on
// which fc1's matrix does not fit, it stays in global memory.
template <class T, bool kHoldsFc1>
struct GateMemory {
  float *fc1_w, *fc1_b, *fc2_w, *fc2_b, *mean, *hidden;
  __host__ __device__ static int weight_floats(const GateMlp<T>& mlp) {
    return kHoldsFc1 ? mlp.weight_floats() : mlp.weight_floats_without_fc1();
  }
  __host__ __device__ static int floats(const GateMlp<T>& mlp) {
    return weight_floats(mlp) + mlp.padded_width() + mlp.padded_hidden();
  }
  __device__ GateMemory(float* memory, const GateMlp<T>& mlp)
      : fc1_w(memory),
        fc1_b(fc1_w + (kHoldsFc1 ? mlp.hidden * mlp.fc1_row() : 0)),
        fc2_w(fc1_b + mlp.hidden),
        fc2_b(fc2_w + 3 * mlp.hidden),
        mean(memory + weight_floats(mlp)),
        hidden(mean + mlp.padded_width()) {}
};
// Loads the MLP's weights into shared memory. A barrier must follow.
template <int kThreads, class T, bool kHoldsFc1>
__device__ void load_gate_weights(const GateMlp<T>& mlp, const GateMemory<T, kHoldsFc1>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
  for (int row = warp; kHoldsFc1 && row < mlp.hidden; row += kThreads / 32)
#pragma unroll 2
    for (int j = lane; j < mlp.width; j += 32)
      memory.fc1_w[row * mlp.fc1_row() + j] = to_float(mlp.fc1_w[row * mlp.fc1_stride + j]);
#pragma unroll 1
  for (int i = threadIdx.x; i < mlp.hidden; i += kThreads) {
    memory.fc1_b[i] = to_float(mlp.fc1_b[i]);
#pragma unroll
    for (int k = 0; k < 3; ++k) memory.fc2_w[k * mlp.hidden + i] = to_float(mlp.fc2_w[k * mlp.fc2_stride + i]);
  }
  if (threadIdx.x < 3) memory.fc2_b[threadIdx.x] = to_float(mlp.fc2_b[threadIdx.x]);
}
// a.gate = the gates for (sequence b, group g), by a CTA with kThreads threads. Warp 0 writes them.
template <int kThreads, class T, bool kHoldsFc1>
__device__ void gate_of(const Decode<T>& a, const GateMlp<T>& mlp, const GateKernelOptions& o,
                        const GateMemory<T, kHoldsFc1>& memory, int b, int g) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (o.computed()) {
    const T* const q = a.q.row(b, 0, int64_t{g} * a.G);
#pragma unroll 1
    for (int j = threadIdx.x; j < mlp.width; j += kThreads) {
      float sum = 0;
#pragma unroll 4
      for (int h = 0; h < a.G; ++h) sum += to_float(q[h * a.q.stride_h + j]);
      memory.mean[j] = sum / static_cast<float>(a.G);
    }
    __syncthreads();
    constexpr int kLanes = 8;  // lanes per hidden unit
#pragma unroll 1
    for (int j0 = 0; j0 < mlp.hidden; j0 += kThreads / kLanes) {
      const int j = j0 + static_cast<int>(threadIdx.x) / kLanes;
      float sum = 0;
      if (j < mlp.hidden)
#pragma unroll 4
        for (int i = threadIdx.x % kLanes; i < mlp.width; i += kLanes)
          sum =
              fmaf(memory.mean[i],
                   kHoldsFc1 ? memory.fc1_w[j * mlp.fc1_row() + i] : to_float(mlp.fc1_w[j * mlp.fc1_stride + i]), sum);
      sum = warp_sum<kLanes>(sum);
      if (j < mlp.hidden && threadIdx.x % kLanes == 0) {
        const float pre = sum + memory.fc1_b[j];
        memory.hidden[j] = pre * sigmoid(pre);
      }
    }
    __syncthreads();
  }
  if (warp > 0) return;
  float z[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    z[k] = k == o.force ? 1.0f : o.uniform && o.force < 0 ? 1.0f / 3.0f : 0.0f;
    if (!o.computed()) continue;
    float sum = 0;
#pragma unroll 1
    for (int j = lane; j < mlp.hidden; j += 32) sum = fmaf(memory.hidden[j], memory.fc2_w[k * mlp.hidden + j], sum);
    z[k] = (warp_sum(sum) + memory.fc2_b[k]) * o.inverse_temperature;
  }
  if (o.computed() && o.softmax) {
    const float max = fmaxf(z[0], fmaxf(z[1], z[2]));
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 3; ++k) sum += z[k] = expf(z[k] - max);
#pragma unroll
    for (int k = 0; k < 3; ++k) z[k] /= sum;
  } else if (o.computed()) {
#pragma unroll
    for (int k = 0; k < 3; ++k) z[k] = sigmoid(z[k]);
  }
  if (lane == 0)
#pragma unroll
    for (int k = 0; k < 3; ++k) a.gate[(k * a.B + b) * a.Hkv + g] = z[k];
}

// Launches all branches, the gate and the combination as one kernel, a CTA for each (sequence, group)
// (decode/decode_many.cu). Returns false and does nothing if it does not support the shape. vectors: whether all rows,
// the queries' too, consist of aligned 16-byte vectors.
bool launch_many(Context&, const Decode<__nv_bfloat16>&, bool vectors, const GateMlp<__nv_bfloat16>&,
                 const GateKernelOptions&);

}  // namespace triad::cuda
