#include "kernels/decode/argmax.h"

#include <algorithm>
#include <cmath>

#include "engine/op_scope.h"
#include "kernels/common/parallel.h"

namespace triad {

void argmax(Context& ctx, Tensor token, ConstTensor logits, int64_t vocab) {
  const OpScope op_scope(ctx, "argmax");
  TRIAD_CHECK(logits.rank == 2 && vocab >= 1 && vocab <= logits.size(1), "argmax: {} tokens of {}", vocab,
              logits.str());
  check_tensor("argmax: token", token, {logits.size(0)}, DType::i32);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::argmax(ctx, token, logits, vocab);
  }
  dispatch_float(logits.dtype, [&]<class T>() {
    parallel_for(ctx, logits.size(0), [&](int64_t i) {
      using A = acc_t<T>;
      const T* row = logits.ptr<T>() + i * logits.stride[0];
      int32_t best = 0;
      bool finite = true;
      for (int64_t j = 0; j < vocab; ++j) {
        finite = finite && std::isfinite(static_cast<A>(row[j]));
        if (static_cast<A>(row[j]) > static_cast<A>(row[best])) best = static_cast<int32_t>(j);
      }
      token.ptr<int32_t>()[i] = finite ? best : -1;
    });
  });
}

void advance(Context& ctx, Tensor position, int64_t last) {
  const OpScope op_scope(ctx, "advance");
  check_tensor("advance: position", position, {position.size(0)}, DType::i32);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::advance(ctx, position, last);
  }
  parallel_for(ctx, position.size(0), [&](int64_t i) {
    int32_t& at = position.ptr<int32_t>()[i];
    at = std::min(at + 1, static_cast<int32_t>(last));
  });
}

}  // namespace triad
