// Copies and adds strided tensors on the CPU, in parallel over their innermost rows.
#include "kernels/step/rows.h"

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

namespace {

void check_rows(const char* op, std::span<const RowPair> pairs) {
  for (const auto& [y, x] : pairs) {
    TRIAD_CHECK(y.shape() == x.shape() && y.rank >= 2 && y.rank <= 4 && is_float(y.dtype) && is_float(x.dtype),
                "{}: from {} to {}", op, x.str(), y.str());
    TRIAD_CHECK(y.dtype == pairs[0].y.dtype && x.dtype == pairs[0].x.dtype, "{}: from {} to {} beside from {} to {}",
                op, x.str(), y.str(), pairs[0].x.str(), pairs[0].y.str());
  }
}

// Where t's innermost row i begins, in elements.
int64_t row_offset(const ConstTensor& t, int64_t i) {
  int64_t offset = 0;
  for (int axis = t.rank - 2; axis >= 0; --axis) {
    offset += i % t.size(axis) * t.stride[static_cast<size_t>(axis)];
    i /= t.size(axis);
  }
  return offset;
}

// Calls use(y, x) for each innermost row pair.
template <class Y, class X, class Use>
void for_each_row(Context& ctx, const Tensor& y, const ConstTensor& x, Use&& use) {
  const int64_t width = y.size(-1);
  if (width == 0) return;
  parallel_for(ctx, y.numel() / width,
               [&](int64_t i) { use(y.ptr<Y>() + row_offset(y, i), x.ptr<X>() + row_offset(x, i)); });
}

}  // namespace

void copy_rows(Context& ctx, std::span<const RowPair> pairs) {
  const OpScope op_scope(ctx, "copy_rows");
  check_rows("copy_rows", pairs);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::copy_rows(ctx, pairs);
  }
  for (const auto& [y, x] : pairs) {
    const int64_t width = y.size(-1);
    dispatch_float(x.dtype, [&]<class X>() {
      dispatch_float(y.dtype, [&]<class Y>() {
        for_each_row<Y, X>(ctx, y, x, [&](Y* to, const X* from) {
          for (int64_t j = 0; j < width; ++j) {
            if constexpr (std::is_same_v<Y, bf16>)
              to[j] = bf16(static_cast<float>(from[j]));
            else
              to[j] = static_cast<Y>(from[j]);
          }
        });
      });
    });
  }
}

void add_rows(Context& ctx, std::span<const RowPair> pairs) {
  const OpScope op_scope(ctx, "add_rows");
  check_rows("add_rows", pairs);
  for (const auto& [y, x] : pairs)
    TRIAD_CHECK(y.dtype == x.dtype && y.dtype != DType::bf16, "add_rows: {} to {}", x.str(), y.str());
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::add_rows(ctx, pairs);
  }
  for (const auto& [y, x] : pairs) {
    const int64_t width = y.size(-1);
    dispatch_float(y.dtype, [&]<class T>() {
      if constexpr (!std::is_same_v<T, bf16>)
        for_each_row<T, T>(ctx, y, x, [&](T* to, const T* from) {
          for (int64_t j = 0; j < width; ++j) to[j] += from[j];
        });
    });
  }
}

}  // namespace triad
