// The vocabulary head and its loss, a chunk of rows at a time. The gradient of a chunk's logits takes their place.
#include "kernels/classifier.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "kernels/cross_entropy.h"
#include "kernels/matmul.h"

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

// A chunk's rows of everything that backward needs too.
struct Chunk {
  int64_t begin, end;
  Tensor logits, lse;
  ConstTensor h, targets;
};

// Fills in the loss chunk by chunk; then(chunk) may do as it likes with the logits.
template <class Then>
void for_each_chunk(Context& ctx, Tensor loss, ConstTensor h, ConstTensor w, ConstTensor targets,
                    const ClassifierOptions& o, Then&& then) {
  const int64_t N = h.size(0), rows = std::min(o.chunk_rows, N);
  Scratch::Scope scope(ctx.scratch);
  const Tensor logits = scope.alloc(h.dtype, {rows, w.size(0)});
  const Tensor lse = scope.alloc(acc_dtype(h.dtype), {rows});
  for (int64_t begin = 0; begin < N; begin += rows) {
    const int64_t end = std::min(begin + rows, N);
    const Chunk chunk = {begin,
                         end,
                         logits.slice(0, 0, end - begin),
                         lse.slice(0, 0, end - begin),
                         h.slice(0, begin, end),
                         targets.slice(0, begin, end)};
    linear_forward(ctx, chunk.logits, chunk.h, w);
    cross_entropy_forward(ctx, loss.slice(0, begin, end), chunk.lse, chunk.logits, chunk.targets, o.vocab);
    then(chunk);
  }
}

}  // namespace

void classifier_forward(Context& ctx, Tensor loss, ConstTensor h, ConstTensor w, ConstTensor targets,
                        const ClassifierOptions& options) {
  const OpScope op_scope(ctx, "classifier_forward");
  check_classifier(loss, h, w, targets, options);
  for_each_chunk(ctx, loss, h, w, targets, options, [](const Chunk&) {});
}

void classifier_forward_backward(Context& ctx, Tensor loss, Tensor dh, Tensor dw, ConstTensor h, ConstTensor w,
                                 ConstTensor targets, double scale, const ClassifierOptions& options) {
  const OpScope op_scope(ctx, "classifier_forward_backward");
  check_classifier(loss, h, w, targets, options);
  check_tensor("classifier's dh", dh, h.shape(), h.dtype);
  check_tensor("classifier's dw", dw, w.shape(), acc_dtype(w.dtype));
  for_each_chunk(ctx, loss, h, w, targets, options, [&](const Chunk& c) {
    const Tensor dlogits = c.logits;
    cross_entropy_backward(ctx, dlogits, c.logits, c.lse, c.targets, options.vocab, scale);
    linear_backward(ctx, dh.slice(0, c.begin, c.end), dw, dlogits, c.h, w);
  });
}

}  // namespace triad
