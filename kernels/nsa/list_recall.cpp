// What lists hold of dense attention: checks, dispatch, and the CPU reference, a row at a time.
#include "kernels/nsa/list_recall.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/op_scope.h"
#include "kernels/nsa/cpu/attend.h"

namespace triad {

namespace {

template <class T>
void list_recall_cpu(Context& ctx, const ListRecall& out, ConstTensor rows, ConstTensor q, ConstTensor k,
                     ConstTensor block_index, int64_t l_sel, const Documents& documents) {
  using A = acc_t<T>;
  const int64_t tokens = q.size(1), heads = q.size(2), dk = q.size(3), groups = k.size(2), n = block_index.size(3);
  const attend_cpu::Rows<const T> q_rows(q), k_rows(k);
  const A scale = A{1} / std::sqrt(static_cast<A>(dk));
  parallel_for(ctx, rows.size(0) * heads, [&](int64_t i) {
    const int64_t row = rows.ptr<int32_t>()[i / heads], b = row / tokens, t = row % tokens, h = i % heads;
    const int64_t g = h / (heads / groups);
    const DocumentRow<int64_t> document = host_row(documents, b, tokens);
    const int64_t keys = t - document.begin(t) + 1;
    const int32_t* const list = block_index.ptr<int32_t>() + (row * groups + g) * n;
    attend_cpu::ThreadBuffer<A> buffer(keys);
    A* const s = buffer.take(keys);  // by distance
    A most = -std::numeric_limits<A>::infinity(), sum = 0;
    for (int64_t distance = 0; distance < keys; ++distance) {
      s[distance] = scale * dot<A>(q_rows(b, t, h), k_rows(b, t - distance, g), dk);
      most = std::max(most, s[distance]);
    }
    A* const all = out.mass.ptr<A>() + i * 2 * kDistanceClasses;
    A* const listed = all + kDistanceClasses;
    std::fill(all, all + 2 * kDistanceClasses, A{0});
    for (int64_t c = 0; c < kDistanceClasses; ++c) {
      for (int64_t distance = distance_begin(c); distance < std::min(distance_begin(c + 1), keys); ++distance) {
        const A e = std::exp(s[distance] - most);
        all[c] += e;
        if (lists_block(list, n, document.block_of(t - distance, l_sel))) listed[c] += e;
      }
      sum += all[c];
    }
    for (A* x = all; x < all + 2 * kDistanceClasses; ++x) *x /= sum;
    out.max_logit.ptr<A>()[i] = most;
  });
}

}  // namespace

void nsa_list_recall(Context& ctx, const ListRecall& out, ConstTensor rows, ConstTensor q, ConstTensor k,
                     ConstTensor block_index, int64_t l_sel, const Documents& documents) {
  const OpScope op_scope(ctx, "nsa_list_recall");
  const int64_t R = rows.size(0), B = q.size(0), T = q.size(1), heads = q.size(2), groups = k.size(2);
  const DType acc = acc_dtype(q.dtype);
  check_tensor("nsa_list_recall: rows", rows, {R}, DType::i32);
  check_tensor("nsa_list_recall: k", k, {B, T, groups, q.size(3)}, q.dtype);
  check_tensor("nsa_list_recall: lists", block_index, {B, T, groups, block_index.size(3)}, DType::i32);
  check_tensor("nsa_list_recall: mass", out.mass, {R, heads, 2, kDistanceClasses}, acc);
  check_tensor("nsa_list_recall: max_logit", out.max_logit, {R, heads}, acc);
  TRIAD_CHECK(heads % groups == 0 && rows.contiguous() && block_index.contiguous() && out.mass.contiguous() &&
                  out.max_logit.contiguous() && documents.part.whole(),
              "nsa_list_recall: q {}, k {}, lists {}", q.str(), k.str(), block_index.str());
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_list_recall(ctx, out, rows, q, k, block_index, l_sel, documents);
  }
  dispatch_float(q.dtype, [&]<class T>() { list_recall_cpu<T>(ctx, out, rows, q, k, block_index, l_sel, documents); });
}

}  // namespace triad
