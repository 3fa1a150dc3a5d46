// Shape checks of upcast and downcast, which exist on GPUs only: on the CPU every route is the reference.
#include "kernels/ops/upcast.h"

#include "engine/check.h"
#include "engine/op_scope.h"

namespace triad {

namespace {

void check_pair(const char* op, const ConstTensor& f32, const ConstTensor& bf16) {
  TRIAD_CHECK((bf16.rank == 2 || bf16.rank == 4) && bf16.dtype == DType::bf16, "{}: {} is no bf16 of two or four axes",
              op, bf16.str());
  check_tensor(op, f32, bf16.shape(), DType::f32);
  TRIAD_CHECK(f32.contiguous(), "{}: {} is strided", op, f32.str());
  TRIAD_CHECK(bf16.device.is_cuda(), "{}: {} is not on a GPU", op, bf16.str());
}

}  // namespace

void upcast(Context& ctx, Tensor y, ConstTensor x) {
  const OpScope op_scope(ctx, "upcast");
  check_pair("upcast", y, x);
  if constexpr (kBuiltWithCuda) cuda::upcast(ctx, y, x);
}

void downcast(Context& ctx, Tensor y, ConstTensor x, ConstTensor addend) {
  const OpScope op_scope(ctx, "downcast");
  check_pair("downcast", x, y);
  if (!addend.empty()) check_pair("downcast: the addend", x, addend);
  if constexpr (kBuiltWithCuda) cuda::downcast(ctx, y, x, addend);
}

ConstTensor upcasted(Context& ctx, Scratch::Scope& scope, ConstTensor x) {
  if (x.dtype == DType::f32) return x;
  const Tensor copy = scope.alloc(DType::f32, x.shape());
  upcast(ctx, copy, x);
  return copy;
}

}  // namespace triad
