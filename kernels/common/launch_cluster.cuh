// CTA cluster launches (sm_90). A cluster's CTAs run at the same time and can synchronise with sync_cluster()
// (common/ptx.cuh).
#pragma once
#include "kernels/common/launch_pdl.cuh"

namespace triad::cuda {

// The launch attribute that groups `ctas` neighbouring CTAs along x into a cluster.
inline cudaLaunchAttribute cluster_attribute(unsigned ctas) {
  cudaLaunchAttribute a{};
  a.id = cudaLaunchAttributeClusterDimension;
  a.val.clusterDim = {ctas, 1, 1};
  return a;
}

// As launch_pdl(), with all CTAs of a grid row (along x) in one cluster. Hopper only.
template <class... Params, class... Args>
void launch_cluster_pdl(Context& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block,
                        size_t shared_bytes, Args&&... args) {
  cudaLaunchAttribute attributes[] = {pdl_attribute(), cluster_attribute(grid.x)};
  launch_with(ctx, attributes, name, kernel, grid, block, shared_bytes, std::forward<Args>(args)...);
}

// How many clusters of `ctas` CTAs of `block` threads can run on the card at once. Clusters of more than 8 CTAs need
// this call before their first launch, since it allows them; on some cards none of them fits. Hopper only.
template <class... Params>
int most_clusters(Context& ctx, void (*kernel)(Params...), unsigned ctas, dim3 block, size_t shared_bytes) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  allow_shared(ctx.device.index, function, shared_bytes);
  CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaLaunchAttribute attribute = cluster_attribute(ctas);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas), config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute, config.numAttrs = 1;
  int clusters = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, function, &config));
  return clusters;
}

}  // namespace triad::cuda
