// Clusters of CTAs (sm_90): they run at the same time, and can wait for each other within a kernel.
#pragma once
#include "kernels/launch_behind.cuh"

namespace triad::cuda {

// Every thread of every CTA of the cluster; what they wrote before, device memory included, is there behind it. Reads
// of it go past L1 (__ldcg): a line may be there from before.
__device__ __forceinline__ void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// As launch_behind(), on Hopper alone: clusters of all CTAs along x.
template <class... Params, class... Args>
void launch_cluster_behind(Context& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block,
                           size_t shared_bytes, Args&&... args) {
  if (ctx.planning || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const OpScope op(ctx, name);
  CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {grid.x, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(ctx.stream.handle());
  config.attrs = attributes, config.numAttrs = 2;
  const cudaError_t e = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  if (e != cudaSuccess)
    fail("kernel {} <<<({}, {}, {}), {}, {} B>>> in clusters: {}", name, grid.x, grid.y, grid.z,
         block.x * block.y * block.z, shared_bytes, cudaGetErrorString(e));
}

}  // namespace triad::cuda
