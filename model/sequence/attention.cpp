#include "model/sequence/attention.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/fork_join.h"
#include "kernels/nsa/document_tables.h"
#include "kernels/step/rows.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

// Keys k [B,rows,Hkv,dk] and values v [B,rows,Hkv,dv], or their gradients. A row is a token or a compressed block.
struct Pair {
  Tensor k, v;
  Pair rows(int64_t begin, int64_t end) const { return {k.slice(1, begin, end), v.slice(1, begin, end)}; }
};

void copy_pair(Context& ctx, const Pair& to, const Pair& from) {
  const RowPair pairs[] = {{to.k, from.k}, {to.v, from.v}};
  copy_rows(ctx, pairs);
}

// Other ranks' rows on their way into `pair`.
struct Coming {
  Pair pair;
  ContextGroup::Transfer transfer;
  const Pair& finish(Context& ctx) const {
    transfer.finish(ctx);
    return pair;
  }
};

// Exchanges in one layer's forward or backward. Memory is allocated in `scope`.
class Exchange {
 public:
  Exchange(const LayerContext& lc, Scratch::Scope& scope)
      : lc_(lc), layout_(lc.layout), group_(*lc.group), scope_(scope), parts_(layout_.parts()) {}

  const RowList& mine(const RowLists& lists) const { return lists[static_cast<size_t>(layout_.rank)]; }
  // Contiguous tensors for this rank's rows. All ranks allocate equally much, since the memory plan is made for one of
  // them.
  Pair alloc(DType dtype, const RowLists& lists) const {
    int64_t most = 0;
    for (const RowList& list : lists) most = std::max(most, row_count(list));
    const int64_t groups = lc_.config.n_kv_groups, rows = row_count(mine(lists));
    const auto alloc_width = [&](int64_t width, const char* name) {
      const Tensor all = scope_.alloc(dtype, {lc_.B * most * groups * width}, name);
      return all.slice(0, 0, lc_.B * rows * groups * width).view({lc_.B, rows, groups, width});
    };
    return {alloc_width(lc_.config.d_k, "keys of the group"), alloc_width(lc_.config.d_v, "values of the group")};
  }
  // This rank's rows of `needs`, from all ranks' tokens.
  Coming gather(Context& ctx, const Pair& to, ConstTensor k, ConstTensor v, const RowLists& needs,
                const char* branch) const {
    return {to, group_.gather(ctx, scope_, {{to.k, k}, {to.v, v}}, parts_, needs, what(kKeys, branch))};
  }
  Coming gather(Context& ctx, ConstTensor k, ConstTensor v, const RowLists& needs, const char* branch) const {
    return gather(ctx, alloc(k.dtype, needs), k, v, needs, branch);
  }
  // All ranks' blocks, from this rank's.
  Coming gather_blocks(Context& ctx, const Pair& to, const Pair& from, const RowLists& blocks,
                       const RowLists& all) const {
    return {to, group_.gather(ctx, scope_, {{to.k, from.k}, {to.v, from.v}}, blocks, all, what(kKeys, "cmp"))};
  }
  // Gradients for this rank's rows in `has`, summed over the ranks, in acc. addends: this rank's, for its rows in
  // `needs`.
  Coming reduce(Context& ctx, const Pair& addends, const RowLists& has, const RowLists& needs,
                const char* branch) const {
    const Pair sums = alloc(addends.k.dtype, has);
    return {sums, group_.reduce(ctx, scope_, {{sums.k, addends.k}, {sums.v, addends.v}}, has, needs,
                                what("gradients", branch))};
  }
  // The same for this rank's tokens.
  Coming reduce(Context& ctx, const Pair& addends, const RowLists& needs, const char* branch) const {
    return reduce(ctx, addends, parts_, needs, branch);
  }

 private:
  static constexpr const char* kKeys = "keys and values";
  std::string what(const char* rows, const char* branch) const {
    return fmt::format("{} of {}, layer {}", rows, branch, lc_.layer);
  }

  const LayerContext& lc_;
  const ContextLayout& layout_;
  ContextGroup& group_;
  Scratch::Scope& scope_;
  const RowLists parts_;
};

// Ends a reduction: dk and dv, overwritten, are the sums in fp32, rounded to their dtype.
void store(Context& ctx, Tensor dk, Tensor dv, const Coming& sums) { copy_pair(ctx, {dk, dv}, sums.finish(ctx)); }

// Run i's rows in a tensor whose axis 1 is this rank's tokens.
template <class TensorType>
TensorType run_rows(const LayerContext& lc, const TensorType& t, int64_t i) {
  return t.slice(1, i * lc.layout.run_tokens, (i + 1) * lc.layout.run_tokens);
}

// Documents for run i's queries, with keys from token first_key to `end`. Tables are allocated in `scope`.
Documents run_documents(Context& ctx, const LayerContext& lc, Scratch::Scope& scope, int64_t i, int64_t first_key,
                        int64_t end) {
  Documents documents = cut_documents(ctx, scope, lc.documents, first_key, end);
  documents.part = lc.layout.run_part(i, first_key);
  return documents;
}

// The rows that an NSA layer exchanges.
struct NsaRows {
  RowLists selected, window, edges, blocks, all_blocks;
  RowLists selected_earlier;  // what queries in a rank's first run see
  NsaRows(const ContextLayout& layout, const NsaConfig& c)
      : selected(layout.prefixes()),
        window(layout.windows(c.w)),
        edges(layout.edges(c.l, c.d)),
        blocks(layout.blocks(c.l, c.d)),
        all_blocks(layout.all_blocks(c.l, c.d)) {
    for (int64_t r = 0; r < layout.ranks; ++r) selected_earlier.push_back({{0, layout.run_of(r, 0).end}});
  }
};

// Compresses run by run: calls f(documents, the run's token rows, its block rows), as rows in tensors for all runs.
template <class Call>
void for_each_compression(Context& ctx, const LayerContext& lc, const Exchange& exchange, const NsaRows& rows,
                          Call&& call) {
  RowRange tokens, blocks;
  for (int64_t i = 0; i < lc.layout.runs(); ++i) {
    const RowRange edge = exchange.mine(rows.edges)[static_cast<size_t>(i)];
    tokens = {tokens.end, tokens.end + edge.size()};
    blocks = {blocks.end, blocks.end + exchange.mine(rows.blocks)[static_cast<size_t>(i)].size()};
    if (blocks.size() == 0) continue;
    Scratch::Scope scope(ctx.scratch);
    call(run_documents(ctx, lc, scope, i, edge.begin, edge.end), tokens, blocks);
  }
}

// The tensor itself if it is contiguous, else a new one with its shape: phi mlp needs contiguous blocks.
Tensor contiguous(Scratch::Scope& scope, const Tensor& t) {
  return t.contiguous() ? t : scope.alloc(t.dtype, t.shape());
}

// This rank's compressed blocks, from keys and values x at its edges.
Pair compress(Context& ctx, const LayerContext& lc, const Exchange& exchange, const Pair& x, const NsaWeights& w,
              const NsaRows& rows) {
  const PhiOptions phi = lc.config.nsa.phi_options();
  const Pair y = exchange.alloc(x.k.dtype, rows.blocks);
  for_each_compression(ctx, lc, exchange, rows, [&](const Documents& documents, const RowRange& t, const RowRange& c) {
    Scratch::Scope inner(ctx.scratch);
    const Pair from = x.rows(t.begin, t.end), to = y.rows(c.begin, c.end);
    const Pair made = {contiguous(inner, to.k), contiguous(inner, to.v)};
    nsa_compress_forward(ctx, made.k, from.k, w.phi_k, phi, documents);
    nsa_compress_forward(ctx, made.v, from.v, w.phi_v, phi, documents);
    if (made.k.data != to.k.data) copy_pair(ctx, to, made);
  });
  return y;
}

// This rank's addends to x's gradients, from its blocks' gradients dy.
Pair compress_backward(Context& ctx, const LayerContext& lc, const Exchange& exchange, const NsaWeightGrads& dw,
                       const Pair& dy, const Pair& x, const NsaWeights& w, const NsaRows& rows) {
  const PhiOptions phi = lc.config.nsa.phi_options();
  const Pair sums = exchange.alloc(dy.k.dtype, rows.edges);
  Scratch::Scope scope(ctx.scratch);
  const Pair dx = Exchange(lc, scope).alloc(x.k.dtype, rows.edges);
  for_each_compression(ctx, lc, exchange, rows, [&](const Documents& documents, const RowRange& t, const RowRange& c) {
    Scratch::Scope inner(ctx.scratch);
    const Pair from = x.rows(t.begin, t.end), to = dx.rows(t.begin, t.end), block_grads = dy.rows(c.begin, c.end);
    const Pair given = {contiguous(inner, block_grads.k), contiguous(inner, block_grads.v)};
    if (given.k.data != block_grads.k.data) copy_pair(ctx, given, block_grads);
    nsa_compress_backward(ctx, to.k, dw.phi_k, given.k, from.k, w.phi_k, phi, documents);
    nsa_compress_backward(ctx, to.v, dw.phi_v, given.v, from.v, w.phi_v, phi, documents);
  });
  copy_pair(ctx, sums, dx);
  return sums;
}

// The branches' inputs for each run.
class BranchInputs {
 public:
  // blocks, selected, window: the keys and values that this rank reads, with rows as in NsaRows. Document tables are
  // allocated in `scope`.
  BranchInputs(Context& ctx, const LayerContext& lc, Scratch::Scope& scope, ConstTensor q, Pair blocks, Pair selected,
               Pair window, RowList windows)
      : lc_(lc),
        q_(q),
        blocks_(std::move(blocks)),
        selected_(std::move(selected)),
        window_(std::move(window)),
        windows_(std::move(windows)) {
    for (int64_t i = 0; i < lc.layout.runs(); ++i) {
      const int64_t end = lc.layout.run(i).end;
      documents_.push_back(run_documents(ctx, lc, scope, i, 0, end));
      window_documents_.push_back(run_documents(ctx, lc, scope, i, windows_[static_cast<size_t>(i)].begin, end));
    }
  }

  // Run i's rows in a tensor that holds all sliding windows' rows.
  RowRange window_rows(int64_t i) const {
    const int64_t begin = i == 0 ? 0 : windows_[0].size();
    return {begin, begin + windows_[static_cast<size_t>(i)].size()};
  }
  AttendIn compressed_in(int64_t i) const { return in(i, blocks_, documents_); }
  AttendIn selected_in(int64_t i) const { return in(i, selected_.rows(0, lc_.layout.run(i).end), documents_); }
  AttendIn window_in(int64_t i) const {
    const RowRange rows = window_rows(i);
    return in(i, window_.rows(rows.begin, rows.end), window_documents_);
  }

 private:
  AttendIn in(int64_t i, const Pair& keys, const std::vector<Documents>& documents) const {
    return {run_rows(lc_, q_, i), keys.k, keys.v, documents[static_cast<size_t>(i)]};
  }

  const LayerContext& lc_;
  ConstTensor q_;
  Pair blocks_, selected_, window_;
  RowList windows_;
  std::vector<Documents> documents_, window_documents_;  // documents for each run's queries
};

// Adds the first rows' addends to `all`.
void add_first(Context& ctx, const Pair& all, const Pair& first) {
  const Pair rows = all.rows(0, first.k.size(1));
  const RowPair pairs[] = {{rows.k, first.k}, {rows.v, first.v}};
  add_rows(ctx, pairs);
}

// Calls work(context, run) for each run. The runs before the last one are computed on a side stream, where they fill
// SMs that the last run's last CTAs leave free. apart: whether they may be; their scratch memory then lies beside the
// last run's.
template <class Work>
void for_each_run(Context& ctx, const LayerContext& lc, Work&& work, bool apart = true) {
  const int64_t last = lc.layout.runs() - 1;
  ForkJoin earlier(
      ctx, 2,
      [&](Context& side) {
        for (int64_t i = 0; i < last; ++i) work(side, i);
      },
      apart);
  work(ctx, last);
  earlier.join();
}

}  // namespace

// The order of nsa/compose.cpp, with each branch once for each run. The links carry the selected branch's keys while
// the compressed branch computes.
void context_nsa_forward(Context& ctx, const LayerContext& lc, Tensor out, const NsaSaved& s, const QkvViews& views,
                         const NsaWeights& w) {
  Scratch::Scope scope(ctx.scratch);
  const NsaConfig& c = lc.config.nsa;
  const Exchange exchange(lc, scope);
  const NsaRows rows(lc.layout, c);
  const NsaIn local = nsa_in(views, lc.documents);
  const Coming edges = exchange.gather(ctx, local.k[kCmp], local.v[kCmp], rows.edges, "cmp, not yet compressed");
  const Coming near = exchange.gather(ctx, local.k[kWin], local.v[kWin], rows.window, "win");
  const Pair all = exchange.alloc(local.k[kSel].dtype, rows.selected);
  const BranchInputs in(ctx, lc, scope, local.q, {s.k_cmp, s.v_cmp}, all, near.pair, exchange.mine(rows.window));
  const auto out_of = [&](int branch, int64_t i) {
    return AttendOut{run_rows(lc, s.o[branch], i), run_rows(lc, s.lse[branch], i)};
  };
  ForkJoin window(ctx, 0, [&](Context& side) {
    near.finish(side);
    for (int64_t i = 0; i < lc.layout.runs(); ++i)
      nsa_attend_window_forward(side, out_of(kWin, i), in.window_in(i), c.w);
  });
  nsa_gate_forward(ctx, s.gate, local.q, w.gate, c.gate);
  const Pair mine = compress(ctx, lc, exchange, edges.finish(ctx), w, rows);
  const Coming blocks = exchange.gather_blocks(ctx, {s.k_cmp, s.v_cmp}, mine, rows.blocks, rows.all_blocks);
  const Coming selected = exchange.gather(ctx, all, local.k[kSel], local.v[kSel], rows.selected, "sel");
  blocks.finish(ctx);
  for_each_run(ctx, lc, [&](Context& on, int64_t i) {
    const AttendIn compressed = in.compressed_in(i);
    const AttendOut compressed_out = out_of(kCmp, i);
    nsa_attend_compressed_forward(on, compressed_out, compressed, c);
    if (!lc.keep_block_index)
      nsa_select(on, run_rows(lc, s.block_index, i), compressed.q, s.k_cmp, compressed_out.lse, c,
                 compressed.documents);
  });
  selected.finish(ctx);
  window.join();
  for_each_run(ctx, lc, [&](Context& on, int64_t i) {
    const Tensor lists = run_rows(lc, s.block_index, i);
    const CombineAlong combine{run_rows(lc, out, i), run_rows(lc, s.o[kCmp], i), run_rows(lc, s.o[kWin], i),
                               s.gate.slice(2, i * lc.layout.run_tokens, (i + 1) * lc.layout.run_tokens)};
    const AttendIn selected_in = in.selected_in(i);
    const AttendOut selected_out = out_of(kSel, i);
    if (nsa_attend_selected_combines(on, selected_out, selected_in, lists, c.l_sel, combine)) {
      nsa_attend_selected_forward(on, selected_out, selected_in, lists, c.l_sel, &combine);
    } else {
      nsa_attend_selected_forward(on, selected_out, selected_in, lists, c.l_sel);
      nsa_combine_forward(on, combine.out, {combine.o_cmp, selected_out.o, combine.o_win}, combine.gate);
    }
  });
}

// The links carry keys while gate gradients are computed, and each branch's key gradients while the next branch
// computes.
void context_nsa_backward(Context& ctx, const LayerContext& lc, const NsaGrad& grad, const NsaWeightGrads& dw,
                          ConstTensor dout, const QkvViews& views, const NsaSaved& s, const NsaWeights& w) {
  Scratch::Scope scope(ctx.scratch);
  const NsaConfig& c = lc.config.nsa;
  const Exchange exchange(lc, scope);
  const NsaRows rows(lc.layout, c);
  const NsaIn local = nsa_in(views, lc.documents);
  const Coming coming_window = exchange.gather(ctx, local.k[kWin], local.v[kWin], rows.window, "win");
  const Coming coming_keys = exchange.gather(ctx, local.k[kSel], local.v[kSel], rows.selected, "sel");
  const Coming edges = exchange.gather(ctx, local.k[kCmp], local.v[kCmp], rows.edges, "cmp, not yet compressed");
  const DType acc = acc_dtype(local.q.dtype);
  const Tensor dgate = scope.alloc(acc, s.gate.shape()), dout_norm = scope.alloc(acc, s.lse[kCmp].shape());
  const Tensor delta = scope.alloc(acc, {3, lc.B, lc.T, lc.config.n_heads});
  nsa_combine_backward(ctx, dgate, delta, dout, {s.o[kCmp], s.o[kSel], s.o[kWin]}, s.gate, grad.out, dout_norm);
  zero(ctx, grad.dq);
  const Pair &near = coming_window.finish(ctx), &keys = coming_keys.finish(ctx);
  const BranchInputs in(ctx, lc, scope, local.q, {s.k_cmp, s.v_cmp}, keys, near, exchange.mine(rows.window));
  // The rounding unit for a query's dq bounds all keys that this rank reads, whatever their document: the query sees no
  // other.
  const std::vector<RoundingUnitBranch> branches = {{s.k_cmp, s.v_cmp, s.gate[kCmp], delta[kCmp], c.d},
                                                    {keys.k, keys.v, s.gate[kSel], delta[kSel]},
                                                    {near.k, near.v, s.gate[kWin], delta[kWin]}};
  const Tensor key_norms = scope.alloc(acc, key_norms_shape(branches));
  attend_key_norms(ctx, key_norms, grad.dq, dout, local.q, branches);
  const Tensor unit = attend_rounding_unit(ctx, scope, grad.dq, dout, local.q, branches, dout_norm, key_norms);
  const auto upstream = [&](int b, int64_t i) {
    return AttendGradIn{run_rows(lc, dout, i), run_rows(lc, ConstTensor(s.gate[b]), i),
                        run_rows(lc, ConstTensor(delta[b]), i), run_rows(lc, ConstTensor(s.lse[b]), i),
                        unit.empty() ? ConstTensor{} : run_rows(lc, ConstTensor(unit), i)};
  };
  const auto to = [&](const Pair& pair, int64_t i) { return AttendGradOut{run_rows(lc, grad.dq, i), pair.k, pair.v}; };

  // Gradients for gathered keys and values, over queries in this rank's last run and in the earlier one. The last run
  // sees the most keys.
  const bool any_order = !unit.empty();
  const int64_t last = lc.layout.runs() - 1;
  const Pair dkeys = exchange.alloc(acc, rows.selected), dnear = exchange.alloc(acc, rows.window);
  const Pair dblocks = exchange.alloc(acc, rows.all_blocks);
  const Pair dkeys_earlier = exchange.alloc(acc, rows.selected_earlier);
  const Pair dblocks_earlier = exchange.alloc(acc, rows.all_blocks);
  ForkJoin window(
      ctx, 0,
      [&](Context& side) {
        for (int64_t i = 0; i <= last; ++i) {
          const RowRange run_range = in.window_rows(i);
          nsa_attend_window_backward(side, to(dnear.rows(run_range.begin, run_range.end), i), upstream(kWin, i),
                                     in.window_in(i), c.w);
        }
      },
      any_order);
  ForkJoin compressed(
      ctx, 1,
      [&](Context& side) {
        for (int64_t i = last; i >= 0; --i)
          nsa_attend_compressed_backward(side, to(i == last ? dblocks : dblocks_earlier, i), upstream(kCmp, i),
                                         in.compressed_in(i), c);
        add_first(side, dblocks, dblocks_earlier);
      },
      any_order);
  // The selected branch's partial dk and dv sums take the most memory. Long runs are computed one after the other, so
  // that only one has them at a time: SMs that stay free at a long run's end cost it nothing.
  constexpr int64_t kLongRun = 1 << 16;
  for_each_run(
      ctx, lc,
      [&](Context& on, int64_t i) {
        const Pair sums = i == last ? dkeys.rows(0, lc.layout.run(i).end) : dkeys_earlier;
        nsa_attend_selected_backward(on, to(sums, i), upstream(kSel, i), in.selected_in(i),
                                     run_rows(lc, s.block_index, i), c.l_sel);
      },
      any_order && lc.layout.run_tokens < kLongRun);
  add_first(ctx, dkeys, dkeys_earlier);
  const Coming sel = exchange.reduce(ctx, dkeys, rows.selected, "sel");
  compressed.join();
  const Coming dmine = exchange.reduce(ctx, dblocks, rows.blocks, rows.all_blocks, "cmp");
  window.join();
  const Coming win = exchange.reduce(ctx, dnear, rows.window, "win");
  nsa_gate_backward(ctx, grad.dq_group, dw.gate, dgate, s.gate, local.q, w.gate, c.gate);
  const Pair dedges = compress_backward(ctx, lc, exchange, dw, dmine.finish(ctx), edges.finish(ctx), w, rows);
  const Coming cmp = exchange.reduce(ctx, dedges, rows.edges, "cmp, not yet compressed");
  store(ctx, grad.k[kSel], grad.v[kSel], sel);
  store(ctx, grad.k[kWin], grad.v[kWin], win);
  store(ctx, grad.k[kCmp], grad.v[kCmp], cmp);
}

void context_dense_forward(Context& ctx, const LayerContext& lc, const DenseSaved& s, const QkvViews& views) {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(lc, scope);
  const Coming coming = exchange.gather(ctx, views.k[0], views.v[0], lc.layout.prefixes(), "dense attention");
  const Pair& all = coming.finish(ctx);
  for (int64_t i = 0; i < lc.layout.runs(); ++i) {
    const Pair seen = all.rows(0, lc.layout.run(i).end);
    dense_attention_forward(
        ctx, {run_rows(lc, s.o, i), run_rows(lc, s.lse, i)},
        {run_rows(lc, views.q, i), seen.k, seen.v, run_documents(ctx, lc, scope, i, 0, lc.layout.run(i).end)});
  }
}

void context_dense_backward(Context& ctx, const LayerContext& lc, const DenseGrad& grad, ConstTensor dout,
                            const QkvViews& views, const DenseSaved& s) {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(lc, scope);
  const RowLists needs = lc.layout.prefixes();
  const Coming coming = exchange.gather(ctx, views.k[0], views.v[0], needs, "dense attention");
  const Pair& all = coming.finish(ctx);
  const Pair addends = exchange.alloc(acc_dtype(views.q.dtype), needs);
  for (int64_t i = lc.layout.runs() - 1; i >= 0; --i) {
    Scratch::Scope inner(ctx.scratch);
    const bool last = i == lc.layout.runs() - 1;
    const int64_t end = lc.layout.run(i).end;
    const Pair seen = all.rows(0, end);
    const Pair its = (last ? addends : Exchange(lc, inner).alloc(addends.k.dtype, needs)).rows(0, end);
    dense_attention_backward(ctx, {run_rows(lc, grad.dq, i), its.k, its.v}, run_rows(lc, dout, i),
                             {run_rows(lc, views.q, i), seen.k, seen.v, run_documents(ctx, lc, inner, i, 0, end)},
                             {run_rows(lc, s.o, i), run_rows(lc, s.lse, i)});
    if (!last) add_first(ctx, addends, its);
  }
  store(ctx, grad.dk, grad.dv, exchange.reduce(ctx, addends, needs, "dense attention"));
}

}  // namespace triad
