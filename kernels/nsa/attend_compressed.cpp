// The compressed branch: checks, dispatch, and the CPU reference's Pattern (cpu/attend.h).
#include "kernels/nsa/attend_compressed.h"

#include "engine/op_scope.h"
#include "kernels/nsa/compress.h"
#include "kernels/nsa/cpu/attend_backward.h"
#include "kernels/nsa/cpu/attend_forward.h"
#include "kernels/nsa/route.h"

namespace triad {

namespace {

// Token t sees a prefix of its document's compressed keys: the blocks that end at or before t.
struct CompressedPattern {
  int64_t T, l, d, blocks;
  Documents documents;
  template <class Visit>
  void keys(int64_t b, int64_t t, int64_t, Visit&& visit) const {
    const DocumentRow<int64_t> row = host_row(documents, b, T);
    const int64_t first = row.first_key(t, d), count = row.visible_keys(t, l, d);
    if (count > 0) visit(first, first + count);
  }
  template <class Visit>
  void rows(int64_t b, int64_t, int64_t begin, int64_t end, Visit&& visit) const {
    const DocumentRow<int64_t> row = host_row(documents, b, T);
    for (int64_t t = begin * d + l - 1; t < row.end(row.owner(end - 1, d)); ++t) {
      const int64_t key = row.first_key(t, d);
      const int64_t first = std::max(begin, key), last = std::min(end, key + row.visible_keys(t, l, d));
      if (first < last) visit(t, first, last);
    }
  }
  int64_t spans() const { return 1; }
  attend_cpu::Span span(int64_t, int64_t) const { return {0, blocks}; }
  int64_t most_keys() const { return blocks; }
};

attend_cpu::PartPattern<CompressedPattern> compressed_pattern(const char* op, const AttendIn& in,
                                                              const CompressionBlocks& o) {
  TRIAD_CHECK(o.l >= 1 && o.d >= 1, "{}: blocks of {} tokens every {}", op, o.l, o.d);
  const RowPart& part = in.documents.part;
  const int64_t row = part.tokens_or(in.q.size(1)), blocks = compressed_length(row, o.l, o.d);
  TRIAD_CHECK(in.k.size(1) == blocks, "{}: {} keys, but {} tokens have {} blocks", op, in.k.size(1), row, blocks);
  TRIAD_CHECK(part.first_key == 0, "{}: the keys begin at token {}", op, part.first_key);
  return attend_cpu::for_part(CompressedPattern{attend_cpu::part_tokens(in), o.l, o.d, blocks, in.documents}, in);
}

}  // namespace

void nsa_attend_compressed_forward(Context& ctx, const AttendOut& out, const AttendIn& in, const CompressionBlocks& o) {
  const OpScope op_scope(ctx, "nsa_attend_compressed_forward");
  check_attend("nsa_attend_compressed", in, out);
  const auto pattern = compressed_pattern("nsa_attend_compressed", in, o);
  if (ctx.device.is_cuda()) {
    return attend_routed(ctx, "nsa_attend_compressed_forward", out, in,
                         [&](Context& on, const AttendOut& to, const AttendIn& from) {
                           if constexpr (kBuiltWithCuda) cuda::nsa_attend_compressed_forward(on, to, from, o);
                         });
  }
  record_cpu(ctx, "nsa_attend_compressed_forward", in.q, in.k);
  dispatch_float(in.q.dtype, [&]<class T>() { attend_cpu::forward<T>(ctx, out, in, pattern); });
}

void nsa_attend_compressed_backward(Context& ctx, const AttendGradOut& out, const AttendGradIn& grad,
                                    const AttendIn& in, const CompressionBlocks& o) {
  const OpScope op_scope(ctx, "nsa_attend_compressed_backward");
  check_attend_grad("nsa_attend_compressed backward", out, grad, in);
  const auto pattern = compressed_pattern("nsa_attend_compressed backward", in, o);
  if (ctx.device.is_cuda()) {
    return attend_routed(ctx, "nsa_attend_compressed_backward", out, grad, in,
                         [&](Context& on, const AttendGradOut& to, const AttendGradIn& upstream, const AttendIn& from) {
                           if constexpr (kBuiltWithCuda)
                             cuda::nsa_attend_compressed_backward(on, to, upstream, from, o);
                         });
  }
  record_cpu(ctx, "nsa_attend_compressed_backward", in.q, in.k);
  dispatch_float(in.q.dtype, [&]<class T>() { attend_cpu::backward<T>(ctx, out, grad, in, pattern); });
}

}  // namespace triad
