// Chooses how a symmetric product is computed: by the Hopper kernel, which computes half of D, if it supports the call;
// otherwise as a batched product.
#include "kernels/update/symmetric_product.h"

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/route.h"
#include "kernels/ops/matmul.h"

namespace triad {

void symmetric_product(Context& ctx, Tensor d, ConstTensor x, const SymmetricProductOptions& o, ConstTensor addend) {
  const OpScope op_scope(ctx, "symmetric_product");
  TRIAD_CHECK(x.rank == 3, "symmetric_product: x {} is not a batch of matrices", x.str());
  const int64_t side = x.size(o.trans ? 2 : 1);
  check_tensor("symmetric_product: d", d, {x.size(0), side, side}, x.dtype);
  if (!addend.empty()) check_tensor("symmetric_product: addend", addend, d.shape(), x.dtype);
  ctx.routes.set_call(d, x);
  if (ctx.device.is_cuda() && d.numel() > 0 && x.numel() > 0 &&
      route_of(ctx, "symmetric_product", x.dtype) == Route::fastest) {
    if constexpr (kBuiltWithCuda) {
      if (cuda::symmetric_product_sm90(ctx, d, x, o, addend)) return;
    }
  }
  matmul_batched(ctx, d, x, x, {.trans_a = o.trans, .trans_b = !o.trans, .alpha = o.alpha}, addend);
}

}  // namespace triad
