// Linear layers that multiply in e4m3 (runtime.matmul_dtype fp8): what is cast, and where they can run.
#pragma once
#include "engine/context.h"

namespace triad {

// What is cast to e4m3, over all layers: each linear layer's input x and its result's gradient dy, and the weights by
// row and by column.
struct Fp8Role {
  enum : int64_t {
    qkv_x,
    qkv_dy,
    out_proj_x,
    out_proj_dy,
    mlp_in_x,
    mlp_in_dy,
    mlp_out_x,
    mlp_out_dy,
    weight_rows,
    weight_columns,
    count
  };
};
inline constexpr const char* kFp8RoleNames[Fp8Role::count] = {
    "qkv_x",     "qkv_dy",    "out_proj_x", "out_proj_dy", "mlp_in_x",
    "mlp_in_dy", "mlp_out_x", "mlp_out_dy", "weight_rows", "weight_columns"};

// Throws UsageError if layers with weights and activations in this dtype cannot multiply in fp8 on ctx.device.
void check_fp8(const Context& ctx, DType dtype);

}  // namespace triad
