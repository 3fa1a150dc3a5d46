// A kernel that comes to the SMs while the one ahead of it in the stream ends (programmatic dependent launch, sm_90):
// its CTAs are there when the last sums are. For short kernels that finish what the one ahead of them began; an
// ordinary launch begins 1.5 us after the end of the kernel ahead.
//   ahead:  let_next_come() where little is left to do. Without it the next kernel comes when all CTAs have ended.
//   behind: wait_for_kernel_ahead() before anything is read or written; launched by launch_behind().
// Elsewhere than on sm_90 both are nothing, and the launch is an ordinary one.
#pragma once
#include "kernels/launch.cuh"

namespace triad::cuda {

__device__ __forceinline__ void let_next_come() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Until it has ended and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// As launch(), which is to be used wherever the kernel does not begin with wait_for_kernel_ahead().
template <class... Params, class... Args>
void launch_behind(Context& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, Args&&... args) {
  if (ctx.compute_capability < 90) return launch(ctx, name, kernel, grid, block, 0, std::forward<Args>(args)...);
  if (ctx.planning || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const OpScope op(ctx, name);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block;
  config.stream = static_cast<cudaStream_t>(ctx.stream.handle());
  config.attrs = &early, config.numAttrs = 1;
  const cudaError_t e = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  if (e != cudaSuccess)
    fail("kernel {} <<<({}, {}, {}), {}>>>: {}", name, grid.x, grid.y, grid.z, block.x * block.y * block.z,
         cudaGetErrorString(e));
}

}  // namespace triad::cuda
