#include "model/fp8.h"

#include "engine/check.h"
#include "kernels/ops/linear_fp8.h"

namespace triad {

void check_fp8(const Context& ctx, DType dtype) {
  if (const std::string why = why_no_fp8(ctx); !why.empty())
    fail_usage(
        "runtime.matmul_dtype is fp8: it needs a Hopper card (compute capability 9.0) and CUDA 12.9 or later, or the "
        "CPU, which computes the same in software; {}",
        why);
  if (dtype != DType::bf16 && (ctx.device.is_cuda() || dtype != DType::f32))
    fail_usage("runtime.matmul_dtype is fp8: it needs bf16 weights and activations{}, and these are {}",
               ctx.device.is_cuda() ? "" : ", or on the CPU fp32 ones", name_of(dtype));
}

}  // namespace triad
