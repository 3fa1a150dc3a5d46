// Checksums on the GPU, bound by memory: each word is read once. Sums are integers, so atomics may add the CTAs' sums
// in any order.
#include <cub/block/block_reduce.cuh>

#include "kernels/common/launch.cuh"
#include "kernels/step/checksum.h"

namespace triad::cuda {
namespace {

constexpr int kThreads = 256, kWordsAThread = 16;

__global__ void __launch_bounds__(kThreads)
    checksum_kernel(unsigned long long* __restrict__ out, const uint32_t* __restrict__ x, int64_t words) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads * kWordsAThread + threadIdx.x;
  unsigned long long sum = 0;
#pragma unroll
  for (int j = 0; j < kWordsAThread; ++j) {
    const int64_t i = begin + j * kThreads;
    if (i < words) sum += x[i] * checksum_weight(static_cast<uint64_t>(i));
  }
  using BlockSum = cub::BlockReduce<unsigned long long, kThreads>;
  __shared__ typename BlockSum::TempStorage memory;
  sum = BlockSum(memory).Sum(sum);
  if (threadIdx.x == 0) atomicAdd(out, sum);
}

}  // namespace

void checksum(Context& ctx, Tensor out, ConstTensor x) {
  zero(ctx, out);
  if (ctx.planning) return;
  const int64_t words = x.bytes() / static_cast<int64_t>(sizeof(uint32_t)), piece = kThreads * kWordsAThread;
  launch(ctx, "checksum", checksum_kernel, dim3(ceil_div(words, piece)), dim3(kThreads), 0,
         reinterpret_cast<unsigned long long*>(out.ptr<int64_t>()), reinterpret_cast<const uint32_t*>(x.data), words);
}

}  // namespace triad::cuda
