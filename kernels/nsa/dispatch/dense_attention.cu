// Dense causal attention on the GPU: token t sees the tokens 0 .. t. The kernels are chosen in
// nsa/dispatch/attend_range.cu.
#include "kernels/nsa/dense_attention.h"

#include "kernels/nsa/dispatch/attend_range.h"

namespace triad::cuda {
namespace {

KeyRange causal_range(const AttendIn& in) {
  const auto tokens = static_cast<int>(end_token(in));
  return {.window = tokens, .l = 1, .d = 1, .keys = tokens, .documents = document_view(in.documents, tokens)};
}

}  // namespace

void dense_attention_forward(Context& ctx, const AttendOut& out, const AttendIn& in) {
  attend_range_forward(ctx, "dense_attention_forward", out, in, causal_range(in));
}

void dense_attention_backward(Context& ctx, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in) {
  attend_range_backward(ctx, "dense_attention_backward", out, grad, in, causal_range(in));
}

}  // namespace triad::cuda
