// Kernels that follow one another within microseconds: on Hopper the next one's CTAs come while the last of this one's
// still run, read what does not depend on it (weights), and wait there for all that came before. A kernel that is
// launched so calls wait_for_previous() in every CTA that reads or writes anything else, and nothing before it.
#pragma once
#include "kernels/launch.cuh"

namespace triad::cuda {

// What the kernels queued before have written is there. (What they still read may be overwritten, too.)
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel's CTAs may come where there is room beside this one's.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// As launch(), chained to the kernel before.
template <class... Params, class... Args>
void launch_chained(Context& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block,
                    size_t shared_bytes, Args&&... args) {
  if (ctx.planning || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (ctx.compute_capability < 90)
    return launch(ctx, name, kernel, grid, block, shared_bytes, std::forward<Args>(args)...);
  const OpScope op(ctx, name);
  constexpr size_t kDefaultSharedLimit = 48 * 1024;
  if (shared_bytes > kDefaultSharedLimit)
    CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)));
  cudaLaunchAttribute chained{};
  chained.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  chained.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(ctx.stream.handle());
  config.attrs = &chained, config.numAttrs = 1;
  const cudaError_t e = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  if (e != cudaSuccess)
    fail("kernel {} <<<({}, {}, {}), {}, {} B>>>: {}", name, grid.x, grid.y, grid.z, block.x * block.y * block.z,
         shared_bytes, cudaGetErrorString(e));
}

}  // namespace triad::cuda
