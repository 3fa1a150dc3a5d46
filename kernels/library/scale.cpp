// scale: checks, dispatch, CPU loop.
#include "kernels/library/scale.h"

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

void scale(Context& ctx, Tensor y, ConstTensor x, double factor, bool add) {
  const OpScope op_scope(ctx, "scale");
  TRIAD_CHECK(x.rank == 4 && is_float(x.dtype) && is_float(y.dtype) && acc_dtype(x.dtype) == acc_dtype(y.dtype),
              "scale: {} from {}", y.str(), x.str());
  check_tensor("scale: y", y, x.shape(), y.dtype);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::scale(ctx, y, x, factor, add);
  }
  const int64_t T_ = x.size(1), H = x.size(2), D = x.size(3);
  dispatch_float(x.dtype, [&]<class From>() {
    using A = acc_t<From>;
    const auto run = [&]<class To>(To) {
      parallel_for(ctx, x.size(0) * T_ * H, [&](int64_t i) {
        const int64_t b = i / H / T_, t = i / H % T_, h = i % H;
        const From* const from = x.ptr<From>() + b * x.stride[0] + t * x.stride[1] + h * x.stride[2];
        To* const to = y.ptr<To>() + b * y.stride[0] + t * y.stride[1] + h * y.stride[2];
        for (int64_t j = 0; j < D; ++j) {
          const A product = static_cast<A>(factor) * static_cast<A>(from[j]);
          to[j] = static_cast<To>(add ? static_cast<A>(to[j]) + product : product);
        }
      });
    };
    if constexpr (std::is_same_v<A, double>) {
      run(double{});
    } else if (y.dtype == DType::bf16) {
      run(bf16{});
    } else {
      run(float{});
    }
  });
}

}  // namespace triad
