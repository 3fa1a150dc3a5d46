// The checksum on the CPU, in one loop over the words.
#include "kernels/step/checksum.h"

#include <cstring>

#include "engine/check.h"
#include "engine/op_scope.h"

namespace triad {

void checksum(Context& ctx, Tensor out, ConstTensor x) {
  const OpScope op_scope(ctx, "checksum");
  constexpr int64_t kWord = sizeof(uint32_t);
  TRIAD_CHECK(x.contiguous() && x.bytes() % kWord == 0, "checksum of {}: contiguous, and whole words, is needed",
              x.str());
  TRIAD_CHECK(out.dtype == DType::i64 && out.numel() == 1, "a checksum goes to one i64, not to {}", out.str());
  if constexpr (kBuiltWithCuda)
    if (ctx.device.is_cuda()) return cuda::checksum(ctx, out, x);
  if (ctx.planning) return;
  uint64_t sum = 0;
  for (int64_t i = 0; i < x.bytes() / kWord; ++i) {
    uint32_t word;
    std::memcpy(&word, x.data + i * kWord, sizeof word);
    sum += word * checksum_weight(static_cast<uint64_t>(i));
  }
  *out.ptr<int64_t>() = static_cast<int64_t>(sum);
}

}  // namespace triad
