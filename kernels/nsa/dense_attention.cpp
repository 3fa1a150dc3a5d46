// Dense causal attention: checks, dispatch, delta and rounding unit before backward, and the CPU reference's Pattern
// (cpu/attend.h).
#include "kernels/nsa/dense_attention.h"

#include "engine/op_scope.h"
#include "kernels/nsa/cpu/attend_backward.h"
#include "kernels/nsa/cpu/attend_forward.h"
#include "kernels/nsa/cpu/index.h"
#include "kernels/nsa/gate.h"
#include "kernels/nsa/index_loss.h"
#include "kernels/nsa/route.h"

namespace triad {

namespace {

struct CausalPattern {
  int64_t T;
  Documents documents;
  template <class Visit>
  void keys(int64_t b, int64_t t, int64_t, Visit&& visit) const {
    visit(host_row(documents, b, T).begin(t), t + 1);
  }
  template <class Visit>
  void rows(int64_t b, int64_t, int64_t begin, int64_t end, Visit&& visit) const {
    const DocumentRow<int64_t> row = host_row(documents, b, T);
    for (int64_t t = begin; t < row.end(end - 1); ++t) {
      const int64_t first = std::max(begin, row.begin(t)), last = std::min(end, t + 1);
      if (first < last) visit(t, first, last);
    }
  }
  int64_t spans() const { return 1; }
  attend_cpu::Span span(int64_t, int64_t) const { return {0, T}; }
  int64_t most_keys() const { return T; }
};

attend_cpu::PartPattern<CausalPattern> causal_pattern(const char* op, const AttendIn& in) {
  check_keys_held(op, in, 0);
  return attend_cpu::for_part(CausalPattern{attend_cpu::part_tokens(in), in.documents}, in);
}

}  // namespace

void dense_attention_forward(Context& ctx, const DenseSaved& saved, const AttendIn& in, const IndexForward* index) {
  const OpScope op_scope(ctx, "dense_attention_forward");
  const AttendOut out{saved.o, saved.lse};
  check_attend("dense_attention", in, out);
  if (index != nullptr) check_index("dense_attention", *index, in);
  const auto pattern = causal_pattern("dense_attention", in);
  if (ctx.device.is_cuda()) {
    attend_routed(ctx, "dense_attention_forward", out, in, [](Context& on, const AttendOut& to, const AttendIn& from) {
      if constexpr (kBuiltWithCuda) cuda::dense_attention_forward(on, to, from);
    });
    if (index != nullptr) index_forward_routed(ctx, *index, in, {}, 0);
    return;
  }
  record_cpu(ctx, "dense_attention_forward", in.q, in.k);
  dispatch_float(in.q.dtype, [&]<class T>() {
    attend_cpu::forward<T>(ctx, out, in, pattern);
    if (index != nullptr) index_cpu::forward<T>(ctx, *index, pattern);
  });
}

AttendGradIn one_softmax_upstream(Context& ctx, Scratch::Scope& scope, const char* op, const DenseGrad& grad,
                                  ConstTensor dout, const AttendIn& in, const DenseSaved& saved) {
  const DType acc = saved.lse.dtype;
  const Tensor delta = scope.alloc(acc, saved.lse.shape(), "delta"), norm = scope.alloc(acc, delta.shape(), "|dout|");
  AttendGradIn upstream{dout, {}, delta, saved.lse};
  check_attend_grad(op, {grad.dq, grad.dk, grad.dv}, upstream, in);
  attention_delta(ctx, delta, dout, saved.o, norm);
  zero(ctx, grad.dq);
  // A row part's tables count from its keys, not its queries. There the unit bounds all the part's keys.
  upstream.rounding_unit = attend_rounding_unit(ctx, scope, grad.dq, dout, in.q, {{in.k, in.v, {}, delta}}, norm, {},
                                                in.documents.part.whole() ? in.documents : Documents{});
  return upstream;
}

void dense_attention_backward(Context& ctx, const DenseGrad& grad, ConstTensor dout, const AttendIn& in,
                              const DenseSaved& saved, const IndexBackward* index) {
  const OpScope op_scope(ctx, "dense_attention_backward");
  check_attend("dense_attention backward", in, {saved.o, saved.lse});
  const auto pattern = causal_pattern("dense_attention backward", in);
  if (index != nullptr) check_index("dense_attention backward", *index, in);
  Scratch::Scope scope(ctx.scratch);
  const AttendGradOut out{grad.dq, grad.dk, grad.dv};
  const AttendGradIn upstream = one_softmax_upstream(ctx, scope, "dense_attention backward", grad, dout, in, saved);
  if (ctx.device.is_cuda()) {
    attend_routed(ctx, "dense_attention_backward", out, upstream, in,
                  [](Context& on, const AttendGradOut& to, const AttendGradIn& from_above, const AttendIn& from) {
                    if constexpr (kBuiltWithCuda) cuda::dense_attention_backward(on, to, from_above, from);
                  });
    if (index != nullptr) index_backward_routed(ctx, *index, in, saved.lse, {}, 0);
    return;
  }
  record_cpu(ctx, "dense_attention_backward", in.q, in.k);
  dispatch_float(in.q.dtype, [&]<class T>() {
    attend_cpu::backward<T>(ctx, out, upstream, in, pattern);
    if (index != nullptr) index_cpu::backward<T>(ctx, *index, in, saved.lse, pattern);
  });
}

void index_cpu::dense_loss(Context& ctx, const IndexForward& forward, const IndexBackward& backward, const AttendIn& in,
                           ConstTensor lse) {
  const auto pattern = causal_pattern("nsa_index_loss", in);
  dispatch_float(in.q.dtype, [&]<class T>() {
    index_cpu::forward<T>(ctx, forward, pattern);
    index_cpu::backward<T>(ctx, backward, in, lse, pattern);
  });
}

}  // namespace triad
