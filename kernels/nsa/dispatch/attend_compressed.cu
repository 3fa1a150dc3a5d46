// The compressed branch on the GPU: token t sees the compressed keys c with c*d + l <= t + 1. The kernels are chosen in
// nsa/dispatch/attend_range.cu.
#include "kernels/nsa/attend_compressed.h"

#include "kernels/nsa/dispatch/attend_range.h"

namespace triad::cuda {
namespace {

KeyRange compressed_range(const AttendIn& in, const CompressionBlocks& options) {
  const auto tokens = static_cast<int>(end_token(in));
  return {.window = tokens,  // no limit
          .l = static_cast<int>(std::min<int64_t>(options.l, tokens + int64_t{1})),
          .d = static_cast<int>(std::min<int64_t>(options.d, tokens + int64_t{1})),
          .keys = static_cast<int>(in.k.size(1)),
          .documents = document_view(in.documents, tokens)};
}

}  // namespace

void nsa_attend_compressed_forward(Context& ctx, const AttendOut& out, const AttendIn& in,
                                   const CompressionBlocks& options) {
  attend_range_forward(ctx, "nsa_attend_compressed_forward", out, in, compressed_range(in, options));
}

void nsa_attend_compressed_backward(Context& ctx, const AttendGradOut& out, const AttendGradIn& grad,
                                    const AttendIn& in, const CompressionBlocks& options) {
  attend_range_backward(ctx, "nsa_attend_compressed_backward", out, grad, in, compressed_range(in, options));
}

}  // namespace triad::cuda
