// A kernel that comes to the SMs while the one ahead of it in the stream ends (programmatic dependent launch, sm_90):
// its CTAs are there when the last sums are. For short kernels, which finish what the one ahead of them began or follow
// one another within microseconds; an ordinary launch begins 1.5 us after the end of the kernel ahead.
//   ahead:  pdl_trigger() where little is left to do. Without it the next kernel comes when all CTAs have ended.
//   behind: pdl_wait(), in every CTA, before anything is written, or read that a kernel queued since
//           the last ordinary launch writes (weights may be read); launched by launch_pdl(). No const __restrict__
//           on what is so written: by it the compiler may take reads past the waiting.
// Elsewhere than on sm_90 both are nothing (other cards run the code for sm_80), and the launch is an ordinary one.
#pragma once
#include "kernels/common/launch.cuh"

namespace triad::cuda {

__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Until it has ended and what it wrote is there.
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

// As launch(), which is to be used wherever the kernel does not call pdl_wait().
template <class... Params, class... Args>
void launch_pdl(Context& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                Args&&... args) {
  cudaLaunchAttribute behind = pdl_attribute();
  const size_t count = ctx.compute_capability == 90 ? 1 : 0;
  launch_with(ctx, {&behind, count}, name, kernel, grid, block, shared_bytes, std::forward<Args>(args)...);
}

}  // namespace triad::cuda
