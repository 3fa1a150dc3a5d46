// For all .cu files: kernel launches, conversion between bf16 and float, dispatch over the GPU's two float types.
#pragma once
#include <cuda_bf16.h>

#include <span>

#include "engine/context.h"
#include "engine/cuda_check.h"
#include "engine/op_scope.h"
#include "kernels/common/integer.h"
#include "kernels/common/warp.cuh"

namespace triad {

template <>
struct dtype_traits<__nv_bfloat16> {
  static constexpr DType value = DType::bf16;
};

namespace cuda {

// Raises a kernel's limit on dynamic shared memory on the current device, which is number `device`, to `bytes` if it is
// lower. By default CUDA allows 48 KB of static and dynamic shared memory together. Each thread remembers what it has
// found to be allowed, since asking CUDA at every launch would take as long as the launch.
inline void allow_shared(int device, const void* kernel, size_t bytes) {
  if (bytes == 0) return;
  struct Allowed {
    const void* kernel;
    int device;
    size_t bytes;
  };
  constexpr size_t kRemembered = 128;
  static thread_local Allowed remembered[kRemembered];
  Allowed& known = remembered[(reinterpret_cast<uintptr_t>(kernel) / 16 + static_cast<size_t>(device)) % kRemembered];
  if (known.kernel == kernel && known.device == device && bytes <= known.bytes) return;
  cudaFuncAttributes has{};
  CUDA_CHECK(cudaFuncGetAttributes(&has, kernel));
  size_t allowed = static_cast<size_t>(has.maxDynamicSharedSizeBytes);
  if (bytes > allowed) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    allowed = bytes;
  }
  known = {kernel, device, allowed};
}

// Launches kernel<<<grid, block, shared_bytes, ctx.stream>>>(args...) with these attributes. Throws, with the kernel's
// name, if CUDA rejects the launch or (on a planning context too) if grid.y or grid.z exceeds CUDA's limit. Otherwise
// does nothing on a planning context or for an empty grid.
template <class... Params, class... Args>
void launch_with(Context& ctx, std::span<cudaLaunchAttribute> attributes, const char* name, void (*kernel)(Params...),
                 dim3 grid, dim3 block, size_t shared_bytes, Args&&... args) {
  constexpr unsigned kMostYZ = 65535;
  if (grid.y > kMostYZ || grid.z > kMostYZ)
    fail_usage("kernel {} needs a grid of ({}, {}, {}): CUDA allows {} along its second and third axes", name, grid.x,
               grid.y, grid.z, kMostYZ);
  if (ctx.planning || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const OpScope op(ctx, name);
  allow_shared(ctx.device.index, reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(ctx.stream.handle());
  config.attrs = attributes.data(), config.numAttrs = static_cast<unsigned>(attributes.size());
  const cudaError_t e = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  if (e == cudaSuccess) return;
  cudaGetLastError();  // clears CUDA's error state
  fail("kernel {} <<<({}, {}, {}), {}, {} B>>>: {}", name, grid.x, grid.y, grid.z, block.x * block.y * block.z,
       shared_bytes, cudaGetErrorString(e));
}

// launch_with() without launch attributes.
template <class... Params, class... Args>
void launch(Context& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            Args&&... args) {
  launch_with(ctx, {}, name, kernel, grid, block, shared_bytes, std::forward<Args>(args)...);
}

// Records in ctx.routes which kernel runs a call to `op`: the fused (sm_90) kernel named `fused`, or, if fused is
// nullptr, the general one, for the reason why_not_fused. A general kernel counts as a fallback only for bf16 on
// Hopper, since fused kernels exist for these alone.
inline void record_route(Context& ctx, const char* op, DType dtype, const char* fused, const char* why_not_fused) {
  const bool meant = dtype == DType::bf16 && ctx.may_use_sm90();
  ctx.routes.record(op, fused != nullptr ? fused : kGeneralKernel, fused != nullptr || !meant ? "" : why_not_fused);
}

inline constexpr const char* kNotFusedHeads = "head widths or alignment that the fused kernels lack";

// Calls f.template operator()<T>() with T = float or __nv_bfloat16.
template <class F>
void dispatch_gpu_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f.template operator()<float>();
    case DType::bf16:
      return f.template operator()<__nv_bfloat16>();
    default:
      fail("dtype {} does not run on the GPU: f32 and bf16 do", name_of(dtype));
  }
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return __float2bfloat16_rn(x);
}

}  // namespace cuda
}  // namespace triad
