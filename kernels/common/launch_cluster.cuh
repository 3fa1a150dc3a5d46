// Clusters of CTAs (sm_90): they run at the same time, and can wait for each other within a kernel.
#pragma once
#include "kernels/common/launch_pdl.cuh"

namespace triad::cuda {

// Every thread of every CTA of the cluster; what they wrote before, device memory included, is there behind it. Reads
// of it go past L1 (__ldcg): a line may be there from before.
__device__ __forceinline__ void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// As launch_pdl(), on Hopper alone: clusters of all CTAs along x.
template <class... Params, class... Args>
void launch_cluster_pdl(Context& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block,
                        size_t shared_bytes, Args&&... args) {
  cudaLaunchAttribute attributes[] = {pdl_attribute(), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {grid.x, 1, 1};
  launch_with(ctx, attributes, name, kernel, grid, block, shared_bytes, std::forward<Args>(args)...);
}

}  // namespace triad::cuda
