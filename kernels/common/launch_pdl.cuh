// Programmatic dependent launch (sm_90): a kernel's CTAs are scheduled while the stream's previous kernel finishes,
// which hides the launch latency. Meant for short kernels that run back to back.
//   previous kernel:  calls pdl_trigger() when little work is left. Without the call, the next kernel starts after all
//                     CTAs have ended.
//   next kernel:      is launched by launch_pdl(). Every CTA calls pdl_wait() before it writes anything, and before it
//                     reads anything written since the last ordinary launch. Weights may be read earlier. Buffers that
//                     earlier kernels write must not be const __restrict__: the compiler could move their loads above
//                     pdl_wait().
// On other cards, which run the sm_80 code, both calls do nothing and the launch is an ordinary one.
#pragma once
#include "kernels/common/launch.cuh"

namespace triad::cuda {

__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Blocks until the previous kernel has ended and its writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline cudaLaunchAttribute pdl_attribute() {
  cudaLaunchAttribute a{};
  a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a.val.programmaticStreamSerializationAllowed = 1;
  return a;
}

// As launch(), with programmatic dependent launch on sm_90. The kernel must call pdl_wait(); other kernels need
// launch().
template <class... Params, class... Args>
void launch_pdl(Context& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                Args&&... args) {
  cudaLaunchAttribute attribute = pdl_attribute();
  const size_t count = ctx.may_use_sm90() ? 1 : 0;
  launch_with(ctx, {&attribute, count}, name, kernel, grid, block, shared_bytes, std::forward<Args>(args)...);
}

}  // namespace triad::cuda
