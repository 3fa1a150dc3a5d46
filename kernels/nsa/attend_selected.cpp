// The selected branch: checks, dispatch, and the CPU reference's Pattern (cpu/attend.h). For dk and dv the CPU builds
// an inverse index in scratch, as long as the lists: for each block the tokens that list it.
#include "kernels/nsa/attend_selected.h"

#include "engine/op_scope.h"
#include "kernels/common/integer.h"
#include "kernels/nsa/cpu/attend_backward.h"
#include "kernels/nsa/cpu/attend_forward.h"
#include "kernels/nsa/cpu/index.h"
#include "kernels/nsa/index_loss.h"
#include "kernels/nsa/route.h"

namespace triad {

namespace {

struct SelectedPattern {
  int64_t T, n, l_sel, blocks;   // T: tokens up to the last query; n: entries per list; blocks: block ids per sequence
  int64_t first_query, queries;  // the tokens that have lists
  Documents documents;
  attend_cpu::Rows<const int32_t> lists;
  // The inverse index, for backward: in sequence b and group g, block j is listed by tokens[begins[j]] ..
  // tokens[begins[j+1] - 1], ascending. They are counted from the row's first token.
  Tensor begins;  // [B,Hkv,blocks+1] i64
  Tensor tokens;  // [B,Hkv,queries*min(n,blocks)] i32

  DocumentRow<int64_t> row(int64_t b) const { return host_row(documents, b, T); }
  const int32_t* list_of(int64_t b, int64_t t, int64_t g) const { return lists(b, t - first_query, g); }
  // Whether token t sees a key of the block, an entry in t's list. False for the padding -1 and for blocks that begin
  // after t.
  bool shows(const DocumentRow<int64_t>& row, int64_t block, int64_t t) const {
    return block >= 0 && row.block_begin(block, l_sel) <= t;
  }

  template <class Visit>
  void keys(int64_t b, int64_t t, int64_t g, Visit&& visit) const {
    const DocumentRow<int64_t> in_row = row(b);
    const int32_t* list = list_of(b, t, g);
    for (int64_t i = 0; i < n && shows(in_row, list[i], t);) {  // merges consecutive blocks into one range
      const int64_t first = list[i];
      int64_t last = first;
      for (++i; i < n && list[i] == last + 1 && shows(in_row, list[i], t); ++i) ++last;
      visit(in_row.block_begin(first, l_sel), std::min(in_row.block_begin(last, l_sel) + l_sel, t + 1));
    }
  }
  template <class Visit>
  void rows(int64_t b, int64_t g, int64_t begin, int64_t end, Visit&& visit) const {
    const int64_t head = b * tokens.size(1) + g;
    const int64_t* from = begins.ptr<int64_t>() + head * (blocks + 1) + row(b).block_of(begin, l_sel);
    const int32_t* t = tokens.ptr<int32_t>() + head * tokens.size(2);
    for (int64_t i = from[0]; i < from[1]; ++i)
      if (t[i] >= begin) visit(int64_t{t[i]}, begin, std::min<int64_t>(end, t[i] + 1));
  }
  int64_t spans() const { return blocks; }
  attend_cpu::Span span(int64_t b, int64_t i) const {
    const DocumentRow<int64_t> in_row = row(b);
    return {in_row.block_begin(i, l_sel), in_row.block_end(i, l_sel)};
  }
  int64_t most_keys() const { return std::min(l_sel, T); }
};

attend_cpu::PartPattern<SelectedPattern> selected_pattern(const char* op, const AttendIn& in,
                                                          const ConstTensor& block_index, int64_t l_sel) {
  const RowPart& part = in.documents.part;
  const int64_t B = in.q.size(0), queries = in.q.size(1), T = attend_cpu::part_tokens(in), Hkv = in.k.size(2);
  check_keys_held(op, in, 0);
  TRIAD_CHECK(part.first_key == 0, "{}: the keys begin at token {}", op, part.first_key);
  TRIAD_CHECK(l_sel >= 1, "{}: blocks of {} tokens", op, l_sel);
  TRIAD_CHECK(block_index.rank == 4, "{}: block_index is {}, which has not four axes", op, block_index.str());
  const int64_t n = block_index.size(3);
  check_tensor("block_index", block_index, {B, queries, Hkv, n}, DType::i32);
  const int64_t blocks = in.documents.empty() ? ceil_div(T, l_sel) : in.documents.ids();
  const attend_cpu::Rows<const int32_t> lists(block_index);
  return attend_cpu::for_part(
      SelectedPattern{T, n, l_sel, blocks, part.first_query, queries, in.documents, lists, {}, {}}, in);
}

// Fills the inverse index, begins and tokens, by a counting sort: counts per block, their prefix sums, then one write
// per list entry.
void invert_lists(Context& ctx, Scratch::Scope& scope, SelectedPattern& p, int64_t B, int64_t Hkv) {
  p.begins = scope.alloc(DType::i64, {B, Hkv, p.blocks + 1});
  p.tokens = scope.alloc(DType::i32, {B, Hkv, p.queries * std::min(p.n, p.blocks)});
  parallel_for(ctx, B * Hkv, [&](int64_t head) {
    int64_t* begins = p.begins.ptr<int64_t>() + head * (p.blocks + 1);
    int32_t* tokens = p.tokens.ptr<int32_t>() + head * p.tokens.size(2);
    auto for_each_entry = [&](auto&& visit) {
      const DocumentRow<int64_t> row = p.row(head / Hkv);
      for (int64_t t = p.first_query; t < p.first_query + p.queries; ++t) {
        const int32_t* list = p.list_of(head / Hkv, t, head % Hkv);
        for (int64_t i = 0; i < p.n && p.shows(row, list[i], t); ++i) visit(t, int64_t{list[i]});
      }
    };
    std::fill_n(begins, p.blocks + 1, int64_t{0});
    for_each_entry([&](int64_t, int64_t block) { ++begins[block + 1]; });
    for (int64_t j = 0; j < p.blocks; ++j) begins[j + 1] += begins[j];
    for_each_entry([&](int64_t t, int64_t block) { tokens[begins[block]++] = static_cast<int32_t>(t); });
    for (int64_t j = p.blocks; j > 0; --j) begins[j] = begins[j - 1];  // the writes advanced begins[j] to begins[j+1]
    begins[0] = 0;
  });
}

}  // namespace

void nsa_attend_selected_forward(Context& ctx, const AttendOut& out, const AttendIn& in, ConstTensor block_index,
                                 int64_t l_sel, const CombineAlong* combine, const IndexForward* index) {
  const OpScope op_scope(ctx, "nsa_attend_selected_forward");
  check_attend("nsa_attend_selected", in, out);
  if (index != nullptr) check_index("nsa_attend_selected", *index, in);
  const auto pattern = selected_pattern("nsa_attend_selected", in, block_index, l_sel);
  if (ctx.device.is_cuda()) {
    attend_routed(ctx, "nsa_attend_selected_forward", out, in,
                  [&](Context& on, const AttendOut& to, const AttendIn& from) {
                    if constexpr (kBuiltWithCuda)
                      cuda::nsa_attend_selected_forward(on, to, from, block_index, l_sel, combine);
                  });
    if (index != nullptr) index_forward_routed(ctx, *index, in, block_index, l_sel);
    return;
  }
  TRIAD_CHECK(combine == nullptr, "nsa_attend_selected: the CPU does not combine along");
  record_cpu(ctx, "nsa_attend_selected_forward", in.q, in.k);
  dispatch_float(in.q.dtype, [&]<class T>() {
    attend_cpu::forward<T>(ctx, out, in, pattern);
    if (index != nullptr) index_cpu::forward<T>(ctx, *index, pattern);
  });
}

bool nsa_attend_selected_combines(const Context& ctx, const AttendOut& out, const AttendIn& in, ConstTensor block_index,
                                  int64_t l_sel, const CombineAlong& combine) {
  if (route_of(ctx, "nsa_attend_selected_forward", in.q.dtype) != Route::fastest) return false;
  if constexpr (kBuiltWithCuda)
    return ctx.device.is_cuda() && cuda::nsa_attend_selected_combines(ctx, out, in, block_index, l_sel, combine);
  return false;
}

void nsa_attend_selected_backward(Context& ctx, const AttendGradOut& out, const AttendGradIn& grad, const AttendIn& in,
                                  ConstTensor block_index, int64_t l_sel, const IndexBackward* index) {
  const OpScope op_scope(ctx, "nsa_attend_selected_backward");
  check_attend_grad("nsa_attend_selected backward", out, grad, in);
  if (index != nullptr) check_index("nsa_attend_selected backward", *index, in);
  auto pattern = selected_pattern("nsa_attend_selected backward", in, block_index, l_sel);
  if (ctx.device.is_cuda()) {
    attend_routed(ctx, "nsa_attend_selected_backward", out, grad, in,
                  [&](Context& on, const AttendGradOut& to, const AttendGradIn& upstream, const AttendIn& from) {
                    if constexpr (kBuiltWithCuda)
                      cuda::nsa_attend_selected_backward(on, to, upstream, from, block_index, l_sel);
                    else
                      cuda::plan_selected_backward(on, from, block_index, l_sel);
                  });
    if (index != nullptr) index_backward_routed(ctx, *index, in, grad.lse, block_index, l_sel);
    return;
  }
  record_cpu(ctx, "nsa_attend_selected_backward", in.q, in.k);
  Scratch::Scope scope(ctx.scratch);
  invert_lists(ctx, scope, pattern.inner, in.q.size(0), in.k.size(2));
  dispatch_float(in.q.dtype, [&]<class T>() {
    attend_cpu::backward<T>(ctx, out, grad, in, pattern);
    if (index != nullptr) index_cpu::backward<T>(ctx, *index, in, grad.lse, pattern);
  });
}

void index_cpu::selected_loss(Context& ctx, const IndexForward& forward, const IndexBackward& backward,
                              const AttendIn& in, ConstTensor lse, ConstTensor block_index, int64_t l_sel) {
  auto pattern = selected_pattern("nsa_index_loss", in, block_index, l_sel);
  Scratch::Scope scope(ctx.scratch);
  invert_lists(ctx, scope, pattern.inner, in.q.size(0), in.k.size(2));
  dispatch_float(in.q.dtype, [&]<class T>() {
    index_cpu::forward<T>(ctx, forward, pattern);
    index_cpu::backward<T>(ctx, backward, in, lse, pattern);
  });
}

}  // namespace triad
