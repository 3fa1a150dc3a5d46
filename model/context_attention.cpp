#include "model/context_attention.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/fork_join.h"
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

// The exchanges of one layer's forward or backward.
class Exchange {
 public:
  Exchange(const LayerContext& lc, Scratch::Scope& scope)
      : lc_(lc), layout_(lc.layout), group_(*lc.group), scope_(scope), parts_(layout_.parts()) {}

  const RowList& mine(const RowLists& lists) const { return lists[static_cast<size_t>(layout_.rank)]; }
  // Contiguous tensors for this rank's rows. All ranks allocate as much, as the plan of memory is that of one of them.
  Pair alloc(DType dtype, const RowLists& lists) const {
    int64_t most = 0;
    for (const RowList& list : lists) most = std::max(most, row_count(list));
    const int64_t groups = lc_.config.n_kv_groups, rows = row_count(mine(lists));
    const auto of_width = [&](int64_t width, const char* name) {
      const Tensor all = scope_.alloc(dtype, {lc_.B * most * groups * width}, name);
      return all.slice(0, 0, lc_.B * rows * groups * width).view({lc_.B, rows, groups, width});
    };
    return {of_width(lc_.config.d_k, "keys of the group"), of_width(lc_.config.d_v, "values of the group")};
  }
  // This rank's rows of `needs`, from the tokens of all ranks.
  Pair gather(Context& ctx, ConstTensor k, ConstTensor v, const RowLists& needs, const char* branch) const {
    const Pair pair = alloc(k.dtype, needs);
    group_.gather(ctx, {{pair.k, k}, {pair.v, v}}, parts_, needs, what("keys and values", branch));
    return pair;
  }
  void gather_blocks(Context& ctx, const Pair& to, const Pair& from, const RowLists& blocks,
                     const RowLists& all) const {
    group_.gather(ctx, {{to.k, from.k}, {to.v, from.v}}, blocks, all, what("keys and values", "cmp"));
  }
  // The sums over the ranks of the gradients of this rank's blocks.
  Pair reduce_blocks(Context& ctx, ConstTensor dk, ConstTensor dv, const RowLists& blocks, const RowLists& all) const {
    const Pair sums = alloc(dk.dtype, blocks);
    group_.reduce(ctx, {{sums.k, dk}, {sums.v, dv}}, blocks, all, what("gradients", "cmp"));
    return sums;
  }
  // dk and dv, overwritten: the sums over the ranks of the gradients of this rank's tokens, in acc, rounded once.
  void reduce(Context& ctx, Tensor dk, Tensor dv, const Pair& addends, const RowLists& needs,
              const char* branch) const {
    Scratch::Scope inner(ctx.scratch);
    const Tensor k = inner.alloc(addends.k.dtype, dk.shape()), v = inner.alloc(addends.v.dtype, dv.shape());
    group_.reduce(ctx, {{k, addends.k}, {v, addends.v}}, parts_, needs, what("gradients", branch));
    copy_rows(ctx, dk, k);
    copy_rows(ctx, dv, v);
  }

 private:
  std::string what(const char* rows, const char* branch) const {
    return fmt::format("{} of {}, layer {}", rows, branch, lc_.layer);
  }

  const LayerContext& lc_;
  const ContextLayout& layout_;
  ContextGroup& group_;
  Scratch::Scope& scope_;
  const RowLists parts_;
};

// The rows of run i of a tensor whose axis 1 is this rank's tokens.
template <class TensorType>
TensorType of_run(const LayerContext& lc, const TensorType& t, int64_t i) {
  return t.slice(1, i * lc.layout.run_tokens, (i + 1) * lc.layout.run_tokens);
}

Documents run_documents(const LayerContext& lc, int64_t i, int64_t first_key = 0) {
  Documents documents = lc.documents;
  documents.part = lc.layout.run_part(i, first_key);
  return documents;
}

// The rows that an NSA layer exchanges.
struct NsaRows {
  RowLists selected, window, edges, blocks, all_blocks;
  NsaRows(const ContextLayout& layout, const NsaConfig& c)
      : selected(layout.prefixes()),
        window(layout.windows(c.w)),
        edges(layout.edges(c.l, c.d)),
        blocks(layout.blocks(c.l, c.d)),
        all_blocks(layout.all_blocks(c.l, c.d)) {}
};

// One call of compression for each run: f(documents, the rows of the run's tokens, those of its blocks), as rows of
// tensors for all runs.
template <class Call>
void for_each_compression(const LayerContext& lc, const Exchange& exchange, const NsaRows& rows, Call&& call) {
  RowRange tokens, blocks;
  for (int64_t i = 0; i < lc.layout.runs(); ++i) {
    const RowRange edge = exchange.mine(rows.edges)[static_cast<size_t>(i)];
    tokens = {tokens.end, tokens.end + edge.size()};
    blocks = {blocks.end, blocks.end + exchange.mine(rows.blocks)[static_cast<size_t>(i)].size()};
    if (blocks.size() > 0) call(run_documents(lc, i, edge.begin), tokens, blocks);
  }
}

// The tensor itself if it is contiguous, else another of its shape: phi mlp needs contiguous blocks.
Tensor contiguous(Scratch::Scope& scope, const Tensor& t) {
  return t.contiguous() ? t : scope.alloc(t.dtype, t.shape());
}

// Fills saved.k_cmp and v_cmp with the blocks of all ranks.
void compress(Context& ctx, const LayerContext& lc, const NsaSaved& s, const NsaIn& local, const NsaWeights& w,
              const NsaRows& rows) {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(lc, scope);
  const PhiOptions phi = lc.config.nsa.phi_options();
  const Pair x = exchange.gather(ctx, local.k[kCmp], local.v[kCmp], rows.edges, "cmp, not yet compressed");
  const Pair y = exchange.alloc(s.k_cmp.dtype, rows.blocks);
  for_each_compression(lc, exchange, rows, [&](const Documents& documents, const RowRange& t, const RowRange& c) {
    Scratch::Scope inner(ctx.scratch);
    const Pair from = x.rows(t.begin, t.end), to = y.rows(c.begin, c.end);
    const Pair made = {contiguous(inner, to.k), contiguous(inner, to.v)};
    nsa_compress_forward(ctx, made.k, from.k, w.phi_k, phi, documents);
    nsa_compress_forward(ctx, made.v, from.v, w.phi_v, phi, documents);
    if (made.k.data != to.k.data) copy_rows(ctx, to.k, made.k), copy_rows(ctx, to.v, made.v);
  });
  exchange.gather_blocks(ctx, {s.k_cmp, s.v_cmp}, y, rows.blocks, rows.all_blocks);
}

// The gradients of the compressed branch's k and v, before compression, from those of the blocks.
void compress_backward(Context& ctx, const LayerContext& lc, const NsaGrad& grad, const NsaWeightGrads& dw,
                       const Pair& dblocks, const NsaIn& local, const NsaWeights& w, const NsaRows& rows) {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(lc, scope);
  const PhiOptions phi = lc.config.nsa.phi_options();
  const Pair dy = exchange.reduce_blocks(ctx, dblocks.k, dblocks.v, rows.blocks, rows.all_blocks);
  const Pair x = exchange.gather(ctx, local.k[kCmp], local.v[kCmp], rows.edges, "cmp, not yet compressed");
  const Pair dx = exchange.alloc(x.k.dtype, rows.edges), sums = exchange.alloc(dy.k.dtype, rows.edges);
  for_each_compression(lc, exchange, rows, [&](const Documents& documents, const RowRange& t, const RowRange& c) {
    Scratch::Scope inner(ctx.scratch);
    const Pair from = x.rows(t.begin, t.end), to = dx.rows(t.begin, t.end), of_y = dy.rows(c.begin, c.end);
    const Pair given = {contiguous(inner, of_y.k), contiguous(inner, of_y.v)};
    if (given.k.data != of_y.k.data) copy_rows(ctx, given.k, of_y.k), copy_rows(ctx, given.v, of_y.v);
    nsa_compress_backward(ctx, to.k, dw.phi_k, given.k, from.k, w.phi_k, phi, documents);
    nsa_compress_backward(ctx, to.v, dw.phi_v, given.v, from.v, w.phi_v, phi, documents);
  });
  copy_rows(ctx, sums.k, dx.k);
  copy_rows(ctx, sums.v, dx.v);
  exchange.reduce(ctx, grad.k[kCmp], grad.v[kCmp], sums, rows.edges, "cmp, not yet compressed");
}

// The inputs of the branches of one layer, and those of each run.
class BranchInputs {
 public:
  BranchInputs(Context& ctx, const LayerContext& lc, const Exchange& exchange, const NsaSaved& s, const NsaIn& local,
               const NsaRows& rows)
      : lc_(lc),
        saved_(s),
        q_(local.q),
        windows_(exchange.mine(rows.window)),
        selected_(exchange.gather(ctx, local.k[kSel], local.v[kSel], rows.selected, "sel")) {
    if (!lc.config.nsa.shared_kv) window_ = exchange.gather(ctx, local.k[kWin], local.v[kWin], rows.window, "win");
  }
  // All keys and values of the branch that this rank reads.
  const Pair& selected() const { return selected_; }
  const Pair& window() const { return window_.k.empty() ? selected_ : window_; }
  // The rows of run i in a tensor for the rows of all windows.
  RowRange window_rows(int64_t i) const {
    const int64_t begin = i == 0 ? 0 : windows_[0].size();
    return {begin, begin + windows_[static_cast<size_t>(i)].size()};
  }

  AttendIn compressed_in(int64_t i) const { return in(i, {saved_.k_cmp, saved_.v_cmp}, 0); }
  AttendIn selected_in(int64_t i) const { return in(i, selected_.rows(0, lc_.layout.run(i).end), 0); }
  AttendIn window_in(int64_t i) const {
    const RowRange seen = windows_[static_cast<size_t>(i)], rows = window_rows(i);
    // With one pair for all branches, the window's keys are among those of the selected branch.
    return in(i, window_.k.empty() ? selected_.rows(seen.begin, seen.end) : window_.rows(rows.begin, rows.end),
              seen.begin);
  }

 private:
  AttendIn in(int64_t i, const Pair& keys, int64_t first_key) const {
    return {of_run(lc_, q_, i), keys.k, keys.v, run_documents(lc_, i, first_key)};
  }

  const LayerContext& lc_;
  const NsaSaved& saved_;
  ConstTensor q_;
  RowList windows_;
  Pair selected_, window_;
};

// Adds addends of the first rows to those of all.
void add_first(Context& ctx, const Pair& all, const Pair& first) {
  const Pair rows = all.rows(0, first.k.size(1));
  add_rows(ctx, rows.k, first.k);
  add_rows(ctx, rows.v, first.v);
}

}  // namespace

// The order of nsa/compose.cpp, with each branch once for each run.
void context_nsa_forward(Context& ctx, const LayerContext& lc, Tensor out, const NsaSaved& s, const QkvViews& views,
                         const NsaWeights& w) {
  Scratch::Scope scope(ctx.scratch);
  const NsaConfig& c = lc.config.nsa;
  const Exchange exchange(lc, scope);
  const NsaRows rows(lc.layout, c);
  const NsaIn local = nsa_in(views, lc.documents);
  const BranchInputs in(ctx, lc, exchange, s, local, rows);
  const auto out_of = [&](int branch, int64_t i) {
    return AttendOut{of_run(lc, s.o[branch], i), of_run(lc, s.lse[branch], i)};
  };
  ForkJoin window(ctx, 0, [&](Context& side) {
    for (int64_t i = 0; i < lc.layout.runs(); ++i)
      nsa_attend_window_forward(side, out_of(kWin, i), in.window_in(i), c.w);
  });
  nsa_gate_forward(ctx, s.gate, local.q, w.gate, c.gate);
  compress(ctx, lc, s, local, w, rows);
  for (int64_t i = 0; i < lc.layout.runs(); ++i) {
    const AttendIn compressed = in.compressed_in(i);
    const AttendOut compressed_out = out_of(kCmp, i);
    nsa_attend_compressed_forward(ctx, compressed_out, compressed, c);
    const Tensor lists = of_run(lc, s.block_index, i);
    if (!lc.keep_block_index)
      nsa_select(ctx, lists, compressed.q, s.k_cmp, compressed_out.lse, c, compressed.documents);
    nsa_attend_selected_forward(ctx, out_of(kSel, i), in.selected_in(i), lists, c.l_sel);
  }
  window.join();
  nsa_combine_forward(ctx, out, {s.o[kCmp], s.o[kSel], s.o[kWin]}, s.gate);
}

void context_nsa_backward(Context& ctx, const LayerContext& lc, const NsaGrad& grad, const NsaWeightGrads& dw,
                          ConstTensor dout, const QkvViews& views, const NsaSaved& s, const NsaWeights& w) {
  Scratch::Scope scope(ctx.scratch);
  const NsaConfig& c = lc.config.nsa;
  const Exchange exchange(lc, scope);
  const NsaRows rows(lc.layout, c);
  const NsaIn local = nsa_in(views, lc.documents);
  const BranchInputs in(ctx, lc, exchange, s, local, rows);
  const DType acc = acc_dtype(local.q.dtype);
  const Tensor dgate = scope.alloc(acc, s.gate.shape()), dout_norm = scope.alloc(acc, s.lse[kCmp].shape());
  const Tensor delta = scope.alloc(acc, {3, lc.B, lc.T, lc.config.n_heads});
  const std::vector<RoundingUnitBranch> branches = {{s.k_cmp, s.v_cmp, s.gate[kCmp], delta[kCmp], c.d},
                                                    {in.selected().k, in.selected().v, s.gate[kSel], delta[kSel]},
                                                    {in.window().k, in.window().v, s.gate[kWin], delta[kWin]}};
  const Tensor key_norms = scope.alloc(acc, key_norms_shape(branches, lc.documents));
  zero(ctx, grad.dq);
  attend_key_norms(ctx, key_norms, grad.dq, dout, local.q, branches, lc.documents);
  nsa_combine_backward(ctx, dgate, delta, dout, {s.o[kCmp], s.o[kSel], s.o[kWin]}, s.gate, grad.out, dout_norm);
  const Tensor unit =
      attend_rounding_unit(ctx, scope, grad.dq, dout, local.q, branches, dout_norm, key_norms, lc.documents);
  const auto upstream = [&](int b, int64_t i) {
    return AttendGradIn{of_run(lc, dout, i), of_run(lc, ConstTensor(s.gate[b]), i),
                        of_run(lc, ConstTensor(delta[b]), i), of_run(lc, ConstTensor(s.lse[b]), i),
                        unit.empty() ? ConstTensor{} : of_run(lc, ConstTensor(unit), i)};
  };
  const auto to = [&](const Pair& pair, int64_t i) { return AttendGradOut{of_run(lc, grad.dq, i), pair.k, pair.v}; };

  // The gradients of gathered keys and values, over this rank's queries. The last run sees the most keys.
  const Pair selected = exchange.alloc(acc, rows.selected), window = exchange.alloc(acc, rows.window);
  const Pair blocks = exchange.alloc(acc, rows.all_blocks);
  ForkJoin on_side(
      ctx, 0,
      [&](Context& side) {
        for (int64_t i = 0; i < lc.layout.runs(); ++i) {
          const RowRange of_run_i = in.window_rows(i);
          nsa_attend_window_backward(side, to(window.rows(of_run_i.begin, of_run_i.end), i), upstream(kWin, i),
                                     in.window_in(i), c.w);
        }
      },
      /*apart=*/!unit.empty());
  for (int64_t i = lc.layout.runs() - 1; i >= 0; --i) {
    Scratch::Scope inner(ctx.scratch);
    const Exchange temporary(lc, inner);
    const bool last = i == lc.layout.runs() - 1;
    const int64_t end = lc.layout.run(i).end;
    const Tensor lists = of_run(lc, s.block_index, i);
    const Pair its_blocks = last ? blocks : temporary.alloc(acc, rows.all_blocks);
    const Pair its_keys = (last ? selected : temporary.alloc(acc, rows.selected)).rows(0, end);
    nsa_attend_selected_backward(ctx, to(its_keys, i), upstream(kSel, i), in.selected_in(i), lists, c.l_sel);
    nsa_attend_compressed_backward(ctx, to(its_blocks, i), upstream(kCmp, i), in.compressed_in(i), c);
    if (last) continue;
    add_first(ctx, selected, its_keys);
    add_first(ctx, blocks, its_blocks);
  }
  on_side.join();
  nsa_gate_backward(ctx, grad.dq_group, dw.gate, dgate, s.gate, local.q, w.gate, c.gate);
  compress_backward(ctx, lc, grad, dw, blocks, local, w, rows);
  exchange.reduce(ctx, grad.k[kSel], grad.v[kSel], selected, rows.selected, "sel");
  exchange.reduce(ctx, grad.k[kWin], grad.v[kWin], window, rows.window, "win");
}

void context_dense_forward(Context& ctx, const LayerContext& lc, const DenseSaved& s, const QkvViews& views) {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(lc, scope);
  const Pair all = exchange.gather(ctx, views.k[0], views.v[0], lc.layout.prefixes(), "dense attention");
  for (int64_t i = 0; i < lc.layout.runs(); ++i) {
    const Pair seen = all.rows(0, lc.layout.run(i).end);
    dense_attention_forward(ctx, {of_run(lc, s.o, i), of_run(lc, s.lse, i)},
                            {of_run(lc, views.q, i), seen.k, seen.v, run_documents(lc, i)});
  }
}

void context_dense_backward(Context& ctx, const LayerContext& lc, const DenseGrad& grad, ConstTensor dout,
                            const QkvViews& views, const DenseSaved& s) {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(lc, scope);
  const RowLists needs = lc.layout.prefixes();
  const Pair all = exchange.gather(ctx, views.k[0], views.v[0], needs, "dense attention");
  const Pair addends = exchange.alloc(acc_dtype(views.q.dtype), needs);
  for (int64_t i = lc.layout.runs() - 1; i >= 0; --i) {
    Scratch::Scope inner(ctx.scratch);
    const bool last = i == lc.layout.runs() - 1;
    const int64_t end = lc.layout.run(i).end;
    const Pair seen = all.rows(0, end);
    const Pair its = (last ? addends : Exchange(lc, inner).alloc(addends.k.dtype, needs)).rows(0, end);
    dense_attention_backward(ctx, {of_run(lc, grad.dq, i), its.k, its.v}, of_run(lc, dout, i),
                             {of_run(lc, views.q, i), seen.k, seen.v, run_documents(lc, i)},
                             {of_run(lc, s.o, i), of_run(lc, s.lse, i)});
    if (!last) add_first(ctx, addends, its);
  }
  exchange.reduce(ctx, grad.dk, grad.dv, addends, needs, "dense attention");
}

}  // namespace triad
