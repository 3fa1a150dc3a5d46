// Memory traffic on the GPU: each CTA reads and writes one piece, 16 KiB in the longer tensor, without a loop. For
// reads alone and for any mixture this was the fastest form tried, and for equal amounts it is as fast as the device's
// own copy.
#include <algorithm>

#include "kernels/common/launch.cuh"
#include "kernels/step/traffic.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kBatch = 4;

// If nothing is written, a comparison with an unlikely value prevents the compiler from removing the reads.
__global__ void __launch_bounds__(kThreads)
    traffic_kernel(uint4* __restrict__ written, int64_t writes, const uint4* __restrict__ read, int64_t reads) {
  const int64_t parts = gridDim.x, part = blockIdx.x;
  const int64_t read_begin = reads * part / parts, read_end = reads * (part + 1) / parts;
  const int64_t write_begin = writes * part / parts, write_end = writes * (part + 1) / parts;
  uint4 v[kBatch], x = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    const int64_t i = read_begin + k * kThreads + threadIdx.x;
    v[k] = i < read_end ? read[i] : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int k = 0; k < kBatch; ++k) x.x ^= v[k].x, x.y ^= v[k].y, x.z ^= v[k].z, x.w ^= v[k].w;
#pragma unroll
  for (int k = 0; k < kBatch; ++k)
    if (const int64_t i = write_begin + k * kThreads + threadIdx.x; i < write_end) written[i] = x;
  if (writes == 0 && x.x == 0x9E3779B9 && x.y == 0x7F4A7C15 && x.z == 0xF39CC060 && x.w == 0x5CEDC834) __trap();
}

}  // namespace

void traffic(Context& ctx, Tensor written, ConstTensor read) {
  const int64_t writes = written.empty() ? 0 : written.bytes() / 16, reads = read.empty() ? 0 : read.bytes() / 16;
  launch(ctx, "traffic", traffic_kernel, dim3(ceil_div(std::max(writes, reads), kBatch * kThreads)), dim3(kThreads), 0,
         reinterpret_cast<uint4*>(written.data), writes, reinterpret_cast<const uint4*>(read.data), reads);
}

}  // namespace triad::cuda
