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

// How many clusters of `ctas` CTAs, each with these threads and bytes of dynamic shared memory, the current device,
// which is number `device`, runs at once. More than 8 CTAs, which not all cards run, are allowed by this call. Each
// thread remembers CUDA's answers.
template <class... Params>
int clusters_at_once(int device, void (*kernel)(Params...), unsigned ctas, unsigned threads, size_t shared_bytes) {
  struct Answer {
    const void* kernel;
    int device, clusters;
    size_t bytes;
  };
  constexpr size_t kRemembered = 32;
  constexpr unsigned kAlwaysAllowed = 8;
  static thread_local Answer remembered[kRemembered];
  const void* const function = reinterpret_cast<const void*>(kernel);
  Answer& known = remembered[(reinterpret_cast<uintptr_t>(function) / 16 + static_cast<size_t>(device)) % kRemembered];
  if (known.kernel == function && known.device == device && known.bytes == shared_bytes) return known.clusters;
  allow_shared(device, function, shared_bytes);
  if (ctas > kAlwaysAllowed)
    CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaLaunchAttribute cluster = cluster_attribute(ctas);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes;
  config.attrs = &cluster, config.numAttrs = 1;
  int clusters = 0;
  const cudaError_t e = cudaOccupancyMaxActiveClusters(&clusters, function, &config);
  if (e == cudaErrorInvalidClusterSize) {
    cudaGetLastError();  // clears CUDA's error state
    clusters = 0;
  } else {
    CUDA_CHECK(e);
  }
  known = {function, device, clusters, shared_bytes};
  return clusters;
}

}  // namespace triad::cuda
