// Conversion between float types on the CPU, in parallel over pieces of the tensor; shape checks for upcast and
// downcast.
#include "kernels/ops/cast.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

template <class To, class From>
To convert(From x) {
  return static_cast<To>(x);
}
// Converts f64 to bf16 with a single rounding. An inexact intermediate float is rounded to odd, so that it is never
// halfway between two bf16 values.
template <>
bf16 convert<bf16, double>(double x) {
  const float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x) return bf16(nearest);
  const uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const uint32_t toward_zero = std::abs(static_cast<double>(nearest)) > std::abs(x) ? bits - 1 : bits;
  return bf16(std::bit_cast<float>(toward_zero | 1u));
}

template <class To, class From>
void cast_cpu(Context& ctx, Tensor dst, ConstTensor src) {
  constexpr int64_t kPiece = 1 << 14;
  const int64_t n = src.numel();
  parallel_for(ctx, ceil_div(n, kPiece), [&](int64_t piece) {
    const From* from = src.ptr<From>();
    To* to = dst.ptr<To>();
    for (int64_t i = piece * kPiece; i < std::min((piece + 1) * kPiece, n); ++i) to[i] = convert<To>(from[i]);
  });
}

}  // namespace

void cast(Context& ctx, Tensor dst, ConstTensor src) {
  const OpScope op_scope(ctx, "cast");
  TRIAD_CHECK(dst.shape() == src.shape() && dst.contiguous() && src.contiguous(),
              "cast from {} to {}: one shape is needed, and no strides", src.str(), dst.str());
  TRIAD_CHECK(is_float(dst.dtype) && is_float(src.dtype), "cast from {} to {}: not both are floats", src.str(),
              dst.str());
  if (dst.dtype == src.dtype) return copy(ctx, dst, src);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::cast(ctx, dst, src);
  }
  dispatch_float(src.dtype, [&]<class From>() {
    dispatch_float(dst.dtype, [&]<class To>() { cast_cpu<To, From>(ctx, dst, src); });
  });
}

namespace {

// Checks the operands for upcast and downcast.
void check_pair(const char* op, const ConstTensor& f32, const ConstTensor& bf16) {
  TRIAD_CHECK((bf16.rank == 2 || bf16.rank == 4) && bf16.dtype == DType::bf16, "{}: {} is no bf16 of two or four axes",
              op, bf16.str());
  check_tensor(op, f32, bf16.shape(), DType::f32);
  TRIAD_CHECK(f32.contiguous(), "{}: {} is strided", op, f32.str());
  TRIAD_CHECK(bf16.device.is_cuda(), "{}: {} is not on a GPU", op, bf16.str());
}

// For tensors in host memory, whatever the device.
void cast_on_host(Tensor dst, ConstTensor src) {
  Runtime cpu({.device = Device::cpu()});
  cast(cpu.ctx(), dst, src);
}

}  // namespace

void write_floats(Context& ctx, Tensor dst, const float* host) {
  if (dst.dtype == DType::f32) return write(ctx, dst, host);
  std::vector<std::byte> converted(static_cast<size_t>(dst.bytes()));
  cast_on_host(Tensor(converted.data(), dst.dtype, dst.shape(), Device::cpu()),
               ConstTensor(reinterpret_cast<const std::byte*>(host), DType::f32, dst.shape(), Device::cpu()));
  write(ctx, dst, converted.data());
}

void read_floats(Context& ctx, float* host, ConstTensor src) {
  if (src.dtype == DType::f32) return read(ctx, host, src);
  std::vector<std::byte> raw(static_cast<size_t>(src.bytes()));
  read(ctx, raw.data(), src);
  cast_on_host(Tensor(reinterpret_cast<std::byte*>(host), DType::f32, src.shape(), Device::cpu()),
               ConstTensor(raw.data(), src.dtype, src.shape(), Device::cpu()));
}

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
