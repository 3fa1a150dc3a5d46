// Shape checks; the kernels are the GPU's: on the CPU the route is the reference already.
#include "kernels/ops/upcast.h"

#include "engine/check.h"
#include "engine/op_scope.h"

namespace triad {

namespace {

void check_pair(const char* op, const ConstTensor& wide, const ConstTensor& x) {
  TRIAD_CHECK((x.rank == 2 || x.rank == 4) && x.dtype == DType::bf16, "{}: {} is no bf16 of two or four axes", op,
              x.str());
  check_tensor(op, wide, x.shape(), DType::f32);
  TRIAD_CHECK(wide.contiguous(), "{}: {} is strided", op, wide.str());
  TRIAD_CHECK(x.device.is_cuda(), "{}: {} is not on a GPU", op, x.str());
}

}  // namespace

void upcast(Context& ctx, Tensor wide, ConstTensor x) {
  const OpScope op_scope(ctx, "upcast");
  check_pair("upcast", wide, x);
  if constexpr (kBuiltWithCuda) cuda::upcast(ctx, wide, x);
}

void downcast(Context& ctx, Tensor y, ConstTensor wide, ConstTensor addend) {
  const OpScope op_scope(ctx, "downcast");
  check_pair("downcast", wide, y);
  if (!addend.empty()) check_pair("downcast: the addend", wide, addend);
  if constexpr (kBuiltWithCuda) cuda::downcast(ctx, y, wide, addend);
}

ConstTensor upcasted(Context& ctx, Scratch::Scope& scope, ConstTensor x) {
  if (x.dtype == DType::f32) return x;
  const Tensor wide = scope.alloc(DType::f32, x.shape());
  upcast(ctx, wide, x);
  return wide;
}

}  // namespace triad
