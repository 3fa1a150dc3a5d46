// The window branch: checks, dispatch, and the CPU reference's Pattern (cpu/attend.h). A window alone
// (window_attention.h) is this branch, and before its backward what attention with one softmax needs.
#include "kernels/nsa/attend_window.h"

#include "engine/op_scope.h"
#include "kernels/nsa/cpu/attend_backward.h"
#include "kernels/nsa/cpu/attend_forward.h"
#include "kernels/nsa/route.h"
#include "kernels/nsa/window_attention.h"

namespace triad {

namespace {

struct WindowPattern {
  int64_t T, w;
  Documents documents;
  template <class Visit>
  void keys(int64_t b, int64_t t, int64_t, Visit&& visit) const {
    visit(std::max(host_row(documents, b, T).begin(t), t - w + 1), t + 1);
  }
  template <class Visit>
  void rows(int64_t b, int64_t, int64_t begin, int64_t end, Visit&& visit) const {
    const DocumentRow<int64_t> row = host_row(documents, b, T);
    for (int64_t t = begin; t < std::min(row.end(end - 1), end - 1 + w); ++t) {
      const int64_t first = std::max({begin, row.begin(t), t - w + 1}), last = std::min(end, t + 1);
      if (first < last) visit(t, first, last);
    }
  }
  int64_t spans() const { return 1; }
  attend_cpu::Span span(int64_t, int64_t) const { return {0, T}; }
  int64_t most_keys() const { return T; }
};

attend_cpu::PartPattern<WindowPattern> window_pattern(const char* op, const AttendIn& in, int64_t w) {
  const RowPart& part = in.documents.part;
  const int64_t row = part.tokens_or(in.q.size(1)), T = attend_cpu::part_tokens(in);
  TRIAD_CHECK(w >= 1, "{}: a window of {} tokens", op, w);
  check_keys_held(op, in, part.first_query - std::min(w, row) + 1);
  return attend_cpu::for_part(WindowPattern{T, std::min(w, T), in.documents}, in);
}

}  // namespace

void nsa_attend_window_forward(Context& ctx, const AttendOut& out, const AttendIn& in, int64_t w) {
  const OpScope op_scope(ctx, "nsa_attend_window_forward");
  check_attend("nsa_attend_window", in, out);
  const auto pattern = window_pattern("nsa_attend_window", in, w);
  if (ctx.device.is_cuda()) {
    return attend_routed(ctx, "nsa_attend_window_forward", out, in,
                         [&](Context& on, const AttendOut& to, const AttendIn& from) {
                           if constexpr (kBuiltWithCuda) cuda::nsa_attend_window_forward(on, to, from, w);
                         });
  }
  record_cpu(ctx, "nsa_attend_window_forward", in.q, in.k);
  dispatch_float(in.q.dtype, [&]<class T>() { attend_cpu::forward<T>(ctx, out, in, pattern); });
}

void nsa_attend_window_backward(Context& ctx, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                                int64_t w) {
  const OpScope op_scope(ctx, "nsa_attend_window_backward");
  check_attend_grad("nsa_attend_window backward", out, grad, in);
  const auto pattern = window_pattern("nsa_attend_window backward", in, w);
  if (ctx.device.is_cuda()) {
    return attend_routed(ctx, "nsa_attend_window_backward", out, grad, in,
                         [&](Context& on, const AttendGradOut& to, const AttendGradIn& upstream, const AttendIn& from) {
                           if constexpr (kBuiltWithCuda) cuda::nsa_attend_window_backward(on, to, upstream, from, w);
                         });
  }
  record_cpu(ctx, "nsa_attend_window_backward", in.q, in.k);
  dispatch_float(in.q.dtype, [&]<class T>() { attend_cpu::backward<T>(ctx, out, grad, in, pattern); });
}

void window_attention_forward(Context& ctx, const DenseSaved& saved, const AttendIn& in, int64_t w) {
  nsa_attend_window_forward(ctx, {saved.o, saved.lse}, in, w);
}

void window_attention_backward(Context& ctx, const DenseGrad& grad, ConstTensor dout, const AttendIn& in,
                               const DenseSaved& saved, int64_t w) {
  Scratch::Scope scope(ctx.scratch);
  const AttendGradIn upstream = one_softmax_upstream(ctx, scope, "window_attention backward", grad, dout, in, saved);
  nsa_attend_window_backward(ctx, {grad.dq, grad.dk, grad.dv}, upstream, in, w);
}

}  // namespace triad
