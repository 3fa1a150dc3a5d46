// What every .cu file shares: the launch helper, bf16 <-> float, dispatch over the two float types of the GPU.
#pragma once
#include <cuda_bf16.h>

#include <span>

#include "engine/context.h"
#include "engine/cuda_check.h"
#include "engine/op_scope.h"

namespace triad {

template <>
struct dtype_traits<__nv_bfloat16> {
  static constexpr DType value = DType::bf16;
};

namespace cuda {

// Lets a kernel have so much shared memory beside what it declares: 48 KB is what a card gives to both together unless
// asked for more.
inline void allow_shared(const void* kernel, size_t bytes) {
  if (bytes == 0) return;
  cudaFuncAttributes has{};
  CUDA_CHECK(cudaFuncGetAttributes(&has, kernel));
  if (bytes > static_cast<size_t>(has.maxDynamicSharedSizeBytes))
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// Launches kernel<<<grid, block, shared_bytes, ctx.stream>>>(args...) with these attributes; a refused launch is an
// error that names the kernel; a grid that CUDA has no room for is one on a planning context too. Else does nothing on
// a planning context or for an empty grid.
template <class... Params, class... Args>
void launch_with(Context& ctx, std::span<cudaLaunchAttribute> attributes, const char* name, void (*kernel)(Params...),
                 dim3 grid, dim3 block, size_t shared_bytes, Args&&... args) {
  constexpr unsigned kMostYZ = 65535;
  if (grid.y > kMostYZ || grid.z > kMostYZ)
    fail_usage("kernel {} needs a grid of ({}, {}, {}): CUDA allows {} along its second and third axes", name, grid.x,
               grid.y, grid.z, kMostYZ);
  if (ctx.planning || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const OpScope op(ctx, name);
  allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(ctx.stream.handle());
  config.attrs = attributes.data(), config.numAttrs = static_cast<unsigned>(attributes.size());
  const cudaError_t e = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  if (e == cudaSuccess) return;
  cudaGetLastError();  // told once
  fail("kernel {} <<<({}, {}, {}), {}, {} B>>>: {}", name, grid.x, grid.y, grid.z, block.x * block.y * block.z,
       shared_bytes, cudaGetErrorString(e));
}

// The same without any.
template <class... Params, class... Args>
void launch(Context& ctx, const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            Args&&... args) {
  launch_with(ctx, {}, name, kernel, grid, block, shared_bytes, std::forward<Args>(args)...);
}

// Counts the kernel that takes a call of `op`: the fused one, or, with the reason why not, the general one. That is a
// fallback for bf16 on Hopper alone: there are fused kernels for nothing else.
inline void record_route(Context& ctx, const char* op, DType dtype, const char* why_not_fused) {
  const bool fused = why_not_fused == nullptr, meant = dtype == DType::bf16 && ctx.compute_capability == 90;
  ctx.routes.record(op, fused ? "sm90" : "general", fused || !meant ? "" : why_not_fused);
}

inline constexpr const char* kNotFusedHeads = "head widths or alignment that the fused kernels lack";

// f.template operator()<T>() with T = float or __nv_bfloat16.
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

__device__ __forceinline__ float warp_sum(float x) {
  for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int o = 16; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
  return x;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace cuda
}  // namespace triad
