// Gradient sums on the CPU, in parallel over pieces of the tensor.
#include "kernels/step/accumulate.h"

#include <algorithm>

#include "engine/op_scope.h"
#include "engine/random_streams.h"
#include "kernels/common/parallel.h"
#include "kernels/common/stochastic.h"
#include "kernels/ops/cast.h"

namespace triad {

namespace {

template <class To, class From>
void accumulate_cpu(Context& ctx, Tensor dst, ConstTensor src, const AccumulateOptions& o) {
  constexpr int64_t kPiece = 1 << 14;
  const int64_t n = src.numel();
  parallel_for(ctx, ceil_div(n, kPiece), [&](int64_t piece) {
    const From* from = src.ptr<From>();
    To* to = dst.ptr<To>();
    StochasticRounder round(o.seed, random_stream(RandomUse::gradient_rounding, static_cast<uint64_t>(o.micro_step)));
    for (int64_t i = piece * kPiece; i < std::min((piece + 1) * kPiece, n); ++i) {
      const acc_t<To> sum = static_cast<acc_t<To>>(to[i]) + static_cast<acc_t<To>>(from[i]);
      if constexpr (std::is_same_v<To, bf16>)
        to[i] = round(sum, o.first_element + i);
      else
        to[i] = sum;
    }
  });
}

}  // namespace

void accumulate(Context& ctx, Tensor dst, ConstTensor src, const AccumulateOptions& o) {
  const OpScope op_scope(ctx, "accumulate");
  const auto in_double = [](const ConstTensor& t) { return t.dtype == DType::f64; };
  TRIAD_CHECK(dst.rank == 1 && src.rank == 1 && dst.numel() == src.numel() && is_float(dst.dtype) &&
                  is_float(src.dtype) && in_double(dst) == in_double(src),
              "accumulate {} in {}: two vectors of floats of one length are needed", src.str(), dst.str());
  TRIAD_CHECK(o.first_element >= 0 && o.micro_step >= 0, "accumulate: first element {}, micro-step {}", o.first_element,
              o.micro_step);
  if (!o.add) return cast(ctx, dst, src);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::accumulate(ctx, dst, src, o);
  }
  if (in_double(dst)) return accumulate_cpu<double, double>(ctx, dst, src, o);
  const auto to_dtype = [&]<class From>() {
    if (dst.dtype == DType::f32)
      accumulate_cpu<float, From>(ctx, dst, src, o);
    else
      accumulate_cpu<bf16, From>(ctx, dst, src, o);
  };
  if (src.dtype == DType::f32)
    to_dtype.template operator()<float>();
  else
    to_dtype.template operator()<bf16>();
}

}  // namespace triad
