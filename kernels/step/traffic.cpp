// Memory traffic on the CPU: XORs all vectors in `read` and writes the result to every vector in `written`.
#include "kernels/step/traffic.h"

#include <array>
#include <cstring>

#include "engine/check.h"
#include "engine/op_scope.h"

namespace triad {

void traffic(Context& ctx, Tensor written, ConstTensor read) {
  const OpScope op_scope(ctx, "traffic");
  constexpr int64_t kVector = 16;
  for (const ConstTensor& t : {ConstTensor(written), read})
    TRIAD_CHECK(t.empty() || (t.contiguous() && t.bytes() % kVector == 0),
                "traffic of {}: contiguous, and a multiple of 16 bytes, is needed", t.str());
  if constexpr (kBuiltWithCuda)
    if (ctx.device.is_cuda()) return cuda::traffic(ctx, written, read);
  if (ctx.planning) return;
  std::array<uint64_t, 2> x{};
  for (int64_t at = 0; !read.empty() && at < read.bytes(); at += kVector) {
    std::array<uint64_t, 2> vector;
    std::memcpy(vector.data(), read.data + at, kVector);
    for (size_t i = 0; i < x.size(); ++i) x[i] ^= vector[i];
  }
  for (int64_t at = 0; !written.empty() && at < written.bytes(); at += kVector)
    std::memcpy(written.data + at, x.data(), kVector);
}

}  // namespace triad
