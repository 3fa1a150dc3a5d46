// The window branch on the GPU: token t sees the tokens t-w+1 .. t. The kernels are chosen in
// nsa/dispatch/attend_range.cu.
#include "kernels/nsa/attend_window.h"

#include "kernels/nsa/dispatch/attend_range.h"

namespace triad::cuda {
namespace {

KeyRange window_range(const AttendIn& in, int64_t w) {
  const auto tokens = static_cast<int>(end_token(in));
  return {.window = static_cast<int>(std::min<int64_t>(w, tokens)),
          .l = 1,
          .d = 1,
          .keys = tokens,
          .documents = document_view(in.documents, tokens)};
}

}  // namespace

void nsa_attend_window_forward(Context& ctx, const AttendOut& out, const AttendIn& in, int64_t w) {
  attend_range_forward(ctx, "nsa_attend_window_forward", out, in, window_range(in, w));
}

void nsa_attend_window_backward(Context& ctx, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                                int64_t w) {
  attend_range_backward(ctx, "nsa_attend_window_backward", out, grad, in, window_range(in, w));
}

}  // namespace triad::cuda
