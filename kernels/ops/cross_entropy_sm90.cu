// Cross-entropy for rows that are too long for one SM's shared memory, such as 128,256 logits in bf16, on Hopper.
// Four or eight CTAs form a cluster and hold a row together, each a part of the columns. So the kernel reads each logit
// once and writes its gradient once, which is 4 bytes per logit in bf16. A forward kernel and a backward kernel
// together move 6 bytes, because both read the logit.
//
// Every warp sends its exponential sum to all of the cluster's CTAs by st.async, and each CTA waits until all warps'
// sums have arrived in its shared memory. sync_cluster() would do as well, but it makes every thread wait until its
// gradient stores for the previous row are visible (measured: tests/baselines/findings/ops.md).
//
// Bound: memory. A cluster runs within a GPC, whose SM count is not always a multiple of the cluster size, so some SMs
// are idle.
#include <algorithm>

#include "kernels/common/launch_cluster.cuh"
#include "kernels/common/shared_limits.h"
#include "kernels/hopper/cluster.cuh"
#include "kernels/ops/cross_entropy.cuh"

namespace triad::cuda {
namespace {

// The partial sums from all of a cluster's warps, in the shared memory of each CTA. Every thread computes the merged
// sum with the same bits, because each merges in the same order.
template <int kClusterCtas>
struct ClusterSums {
  static constexpr int kCtas = kClusterCtas;
  float2 parts[kCtas][kResidentWarps];  // max and sum
  Barrier arrived;                      // a phase completes when all parts have arrived in this CTA

  __device__ void put(const ExpSum& merged) {
    if (threadIdx.x == 0) barrier_expect(&arrived, sizeof(parts));
    const int lane = threadIdx.x % 32, cta = static_cast<int>(blockIdx.x) % kCtas;
    if (lane < kCtas) store_async_at(&parts[cta][threadIdx.x / 32], &arrived, lane, merged.max, merged.sum);
  }
  __device__ void wait(unsigned phase) {
    barrier_wait(&arrived, phase);
    __syncwarp();
  }
  __device__ ExpSum merge() const {
    ExpSum all;
#pragma unroll
    for (int cta = 0; cta < kCtas; ++cta) {
      const float2 part = parts[cta][threadIdx.x % 32];
      all.add(ExpSum{part.x, part.y});
    }
    all.merge_warp();
    return all;
  }
};

template <class T, int kCtas>
__global__ void __launch_bounds__(kResidentThreads, 1)
    cross_entropy_cluster_kernel(float* __restrict__ loss, T* dlogits, const T* logits, LogitsShape shape,
                                 const int32_t* __restrict__ targets, int buffers, int part_columns, LossScale scale) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ ClusterSums<kCtas> sums[2];
  if (threadIdx.x == 0) {
    for (auto& s : sums) barrier_init(&s.arrived, 1);
    barrier_init_done();
  }
  sync_cluster();  // the CTAs may store to each other's shared memory once this returns
  process_resident_rows(sums, loss, dlogits, logits, shape, targets, buffers, part_columns, scale);
  // After the sums of its last row have arrived, a CTA receives no more stores, so it may end before the others.
#endif
}

// Launches as many kCtas-CTA clusters as run at the same time; they loop over the rows. Returns false and launches
// nothing if a cluster does not hold `buffers` rows, or if the card cannot run such a cluster.
template <class T, int kCtas>
bool run(Context& ctx, const Tensor& loss, const Tensor& dlogits, const ConstTensor& logits, const ConstTensor& targets,
         int64_t vocab, LossScale scale, int buffers) {
  constexpr int64_t kLine = 128 / sizeof(T);  // parts begin at multiples of 128 bytes from the row start
  const int64_t part_columns = ceil_div(logits.size(1), kCtas * kLine) * kLine;
  const int64_t free_bytes = shared_limits(ctx).cta_bytes - static_cast<int64_t>(sizeof(ClusterSums<kCtas>[2]));
  const int64_t bytes = buffers * part_columns * static_cast<int64_t>(sizeof(T));
  if (bytes > free_bytes) return false;
  if (ctx.planning) return true;
  const auto kernel = cross_entropy_cluster_kernel<T, kCtas>;
  const int clusters = clusters_at_once(ctx.device.index, kernel, kCtas, kResidentThreads, static_cast<size_t>(bytes));
  if (clusters == 0) return false;
  const LogitsShape shape = {logits.size(0), vocab, logits.size(1), logits.stride[0], dlogits.stride[0]};
  cudaLaunchAttribute cluster = cluster_attribute(kCtas);
  launch_with(ctx, {&cluster, 1}, "cross_entropy", kernel, dim3(kCtas * std::min<int64_t>(clusters, shape.rows)),
              dim3(kResidentThreads), bytes, loss.ptr<float>(), dlogits.ptr<T>(), logits.ptr<T>(), shape,
              targets.ptr<int32_t>(), buffers, static_cast<int>(part_columns), scale);
  return true;
}

}  // namespace

// With two rows per cluster, one loads while the other is used. Two-CTA clusters are not tried: a row that is too long
// for one CTA fills more than half of two, so a second row never fits.
bool cross_entropy_forward_backward_sm90(Context& ctx, const Tensor& loss, const Tensor& dlogits,
                                         const ConstTensor& logits, const ConstTensor& targets, int64_t vocab,
                                         LossScale scale) {
  if (!ctx.may_use_sm90()) return false;
  bool done = false;
  dispatch_gpu_float(logits.dtype, [&]<class T>() {
    if (!all_have_vectors(kVector<T>, logits, dlogits)) return;
    done = run<T, 4>(ctx, loss, dlogits, logits, targets, vocab, scale, 2) ||
           run<T, 8>(ctx, loss, dlogits, logits, targets, vocab, scale, 2) ||
           run<T, 8>(ctx, loss, dlogits, logits, targets, vocab, scale, 1);
  });
  return done;
}

}  // namespace triad::cuda
