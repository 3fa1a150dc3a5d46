// The vocabulary head and its loss, for a chunk of rows at a time. A chunk's gradient overwrites the logits.
#include "kernels/ops/classifier.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/ops/cross_entropy.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

void check_classifier(ConstTensor loss, ConstTensor h, ConstTensor w, ConstTensor targets, const ClassifierOptions& o) {
  TRIAD_CHECK(h.rank == 2 && w.rank == 2, "classifier: h is {} and w is {}, not matrices", h.str(), w.str());
  check_tensor("classifier's w", w, {w.size(0), h.size(1)}, h.dtype);
  check_tensor("classifier's loss", loss, {h.size(0)}, acc_dtype(h.dtype));
  check_tensor("classifier's targets", targets, {h.size(0)}, DType::i32);
  TRIAD_CHECK(0 < o.vocab && o.vocab <= w.size(0), "classifier: a vocabulary of {} for w {}", o.vocab, w.str());
  TRIAD_CHECK(o.chunk_rows > 0, "classifier: chunks of {} rows", o.chunk_rows);
}

// Computes each chunk's logits and calls then(begin, end, logits), where [begin, end) are the chunk's rows; `then` may
// overwrite the logits.
template <class Then>
void for_each_chunk(Context& ctx, ConstTensor h, ConstTensor w, const ClassifierOptions& o, Then&& then) {
  const int64_t N = h.size(0), rows = std::min(o.chunk_rows, N);
  Scratch::Scope scope(ctx.scratch);
  const Tensor all_logits = scope.alloc(h.dtype, {rows, w.size(0)}, "logits");
  for (int64_t begin = 0; begin < N; begin += rows) {
    const int64_t end = std::min(begin + rows, N);
    const Tensor logits = all_logits.slice(0, 0, end - begin);
    linear_forward(ctx, logits, h.slice(0, begin, end), w);
    then(begin, end, logits);
  }
}

}  // namespace

void classifier_forward(Context& ctx, Tensor loss, ConstTensor h, ConstTensor w, ConstTensor targets,
                        const ClassifierOptions& options) {
  const OpScope op_scope(ctx, "classifier_forward");
  check_classifier(loss, h, w, targets, options);
  Scratch::Scope scope(ctx.scratch);
  const Tensor lse = scope.alloc(loss.dtype, loss.shape());
  for_each_chunk(ctx, h, w, options, [&](int64_t begin, int64_t end, Tensor logits) {
    cross_entropy_forward(ctx, loss.slice(0, begin, end), lse.slice(0, begin, end), logits,
                          targets.slice(0, begin, end), options.vocab);
  });
}

void classifier_forward_backward(Context& ctx, Tensor loss, Tensor dh, Tensor dw, ConstTensor h, ConstTensor w,
                                 ConstTensor targets, LossScale scale, const ClassifierOptions& options) {
  const OpScope op_scope(ctx, "classifier_forward_backward");
  check_classifier(loss, h, w, targets, options);
  check_tensor("classifier's dh", dh, h.shape(), h.dtype);
  if (!dw.empty()) check_tensor("classifier's dw", dw, w.shape(), acc_dtype(w.dtype));
  for_each_chunk(ctx, h, w, options, [&](int64_t begin, int64_t end, Tensor logits) {
    const Tensor dlogits = logits;
    cross_entropy_forward_backward(ctx, loss.slice(0, begin, end), dlogits, logits, targets.slice(0, begin, end),
                                   options.vocab, scale);
    // dw first, since dh may be h.
    if (!dw.empty()) linear_backward_weight(ctx, dw, dlogits, h.slice(0, begin, end), options.add_dw || begin > 0);
    linear_backward_input(ctx, dh.slice(0, begin, end), dlogits, w);
  });
}

}  // namespace triad
