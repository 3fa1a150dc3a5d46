#include "model/sequence/exchange.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/step/rows.h"

namespace triad {

namespace {
constexpr const char* kKeys = "keys and values";
}

void copy_kv(Context& ctx, const KvRows& to, const KvRows& from) {
  const RowPair pairs[] = {{to.k, from.k}, {to.v, from.v}};
  copy_rows(ctx, pairs);
}

const KvRows& PendingRows::finish(Context& ctx) const {
  transfer.finish(ctx);
  return pair;
}

Exchange::Exchange(SequenceGroup& group, const LayerContext& lc, Scratch::Scope& scope)
    : lc_(lc), layout_(lc.layout), group_(group), scope_(scope), tokens_(layout_.tokens_by_rank()) {}

KvRows Exchange::alloc(DType dtype, const RowLists& lists) const {
  int64_t most = 0;
  for (const RowList& list : lists) most = std::max(most, row_count(list));
  const int64_t groups = lc_.config.n_kv_groups, rows = row_count(local(lists));
  const auto alloc_width = [&](int64_t width, const char* name) {
    const Tensor all = scope_.alloc(dtype, {lc_.B * most * groups * width}, name);
    return all.slice(0, 0, lc_.B * rows * groups * width).view({lc_.B, rows, groups, width});
  };
  return {alloc_width(lc_.config.d_k, "keys of the group"), alloc_width(lc_.config.d_v, "values of the group")};
}

PendingRows Exchange::gather(Context& ctx, const KvRows& to, ConstTensor k, ConstTensor v, const RowLists& needs,
                             const char* branch) const {
  return {to, group_.gather(ctx, scope_, {{to.k, k}, {to.v, v}}, tokens_, needs, what(kKeys, branch))};
}

PendingRows Exchange::gather(Context& ctx, ConstTensor k, ConstTensor v, const RowLists& needs,
                             const char* branch) const {
  return gather(ctx, alloc(k.dtype, needs), k, v, needs, branch);
}

PendingRows Exchange::gather_blocks(Context& ctx, const KvRows& to, const KvRows& from, const RowLists& blocks,
                                    const RowLists& all) const {
  return {to, group_.gather(ctx, scope_, {{to.k, from.k}, {to.v, from.v}}, blocks, all, what(kKeys, "cmp"))};
}

PendingRows Exchange::reduce(Context& ctx, const KvRows& addends, const RowLists& has, const RowLists& needs,
                             const char* branch) const {
  const KvRows sums = alloc(addends.k.dtype, has);
  return {sums, group_.reduce(ctx, scope_, {{sums.k, addends.k}, {sums.v, addends.v}}, has, needs,
                              what("gradients", branch))};
}

PendingRows Exchange::reduce(Context& ctx, const KvRows& addends, const RowLists& needs, const char* branch) const {
  return reduce(ctx, addends, tokens_, needs, branch);
}

std::string Exchange::what(const char* rows, const char* branch) const {
  return fmt::format("{} of {}, layer {}", rows, branch, lc_.layer);
}

void store(Context& ctx, Tensor dk, Tensor dv, const PendingRows& sums) { copy_kv(ctx, {dk, dv}, sums.finish(ctx)); }

}  // namespace triad
