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

}  // namespace triad::cuda
