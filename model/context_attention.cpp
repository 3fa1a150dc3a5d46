#include "model/context_attention.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/nsa/compose.h"
#include "kernels/step/rows.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

// Keys and values, or their gradients: [B,rows,Hkv,dk] and [B,rows,Hkv,dv].
struct Pair {
  Tensor k, v;
};

// The exchanges of one layer's forward or backward.
class Exchange {
 public:
  Exchange(const LayerContext& lc, Scratch::Scope& scope)
      : lc_(lc), layout_(lc.layout), group_(*lc.group), scope_(scope), parts_(layout_.parts()) {}

  const ContextLayout& layout() const { return layout_; }
  const RowRange& mine(const RowRanges& ranges) const { return ranges[static_cast<size_t>(layout_.rank)]; }
  // Contiguous tensors for this rank's rows. All ranks allocate as much, as the plan of memory is that of one of them.
  Pair alloc(DType dtype, const RowRanges& ranges) const {
    int64_t most = 0;
    for (const RowRange& range : ranges) most = std::max(most, range.size());
    const int64_t groups = lc_.config.n_kv_groups, rows = mine(ranges).size();
    const auto of_width = [&](int64_t width, const char* name) {
      const Tensor all = scope_.alloc(dtype, {lc_.B * most * groups * width}, name);
      return all.slice(0, 0, lc_.B * rows * groups * width).view({lc_.B, rows, groups, width});
    };
    return {of_width(lc_.config.d_k, "keys of the group"), of_width(lc_.config.d_v, "values of the group")};
  }
  // This rank's rows of `needs`, from the tokens of all ranks.
  Pair gather(Context& ctx, ConstTensor k, ConstTensor v, const RowRanges& needs, const char* branch) const {
    const Pair pair = alloc(k.dtype, needs);
    group_.gather(ctx, {{pair.k, k}, {pair.v, v}}, parts_, needs, what("keys and values", branch));
    return pair;
  }
  void gather_blocks(Context& ctx, const Pair& to, const Pair& from, const RowRanges& blocks,
                     const RowRanges& all) const {
    group_.gather(ctx, {{to.k, from.k}, {to.v, from.v}}, blocks, all, what("keys and values", "cmp"));
  }
  // The sums over the ranks of the gradients of this rank's blocks.
  Pair reduce_blocks(Context& ctx, ConstTensor dk, ConstTensor dv, const RowRanges& blocks,
                     const RowRanges& all) const {
    const Pair sums = alloc(dk.dtype, blocks);
    group_.reduce(ctx, {{sums.k, dk}, {sums.v, dv}}, blocks, all, what("gradients", "cmp"));
    return sums;
  }
  // dk and dv, overwritten: the sums over the ranks of the gradients of this rank's tokens, in acc, rounded once.
  void reduce(Context& ctx, Tensor dk, Tensor dv, const Pair& addends, const RowRanges& needs,
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
  const RowRanges parts_;
};

// The ranges of rows that the branches of an NSA layer need.
struct NsaRanges {
  RowRanges selected, window, edges, blocks, all_blocks;
  NsaRanges(const ContextLayout& layout, const NsaConfig& c)
      : selected(layout.prefixes()),
        // With one pair for all branches, the window reads the keys of the selected branch.
        window(c.shared_kv ? layout.prefixes() : layout.windows(c.w)),
        edges(layout.edges(c.l, c.d)),
        blocks(layout.blocks(c.l, c.d)),
        all_blocks(layout.all_blocks(c.l, c.d)) {}
};

// The inputs of nsa/compose.h: q of this rank, and the gathered keys and values of sel and win.
NsaIn gathered(Context& ctx, const LayerContext& lc, const Exchange& exchange, const NsaIn& local,
               const NsaRanges& ranges) {
  NsaIn in = local;
  const Pair selected = exchange.gather(ctx, local.k[kSel], local.v[kSel], ranges.selected, "sel");
  in.k[kSel] = selected.k, in.v[kSel] = selected.v;
  const Pair window =
      lc.config.nsa.shared_kv ? selected : exchange.gather(ctx, local.k[kWin], local.v[kWin], ranges.window, "win");
  in.k[kWin] = window.k, in.v[kWin] = window.v;
  in.first_window_key = exchange.mine(ranges.window).begin;
  return in;
}

// The tables for the tokens from which this rank makes its blocks.
Documents edge_documents(const LayerContext& lc, const Exchange& exchange, const NsaRanges& ranges) {
  Documents documents = lc.documents;
  documents.part.first_key = exchange.mine(ranges.edges).begin;
  return documents;
}

// Fills saved.k_cmp and v_cmp with the blocks of all ranks.
void compress(Context& ctx, const LayerContext& lc, const NsaSaved& s, const NsaIn& local, const NsaWeights& w,
              const NsaRanges& ranges) {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(lc, scope);
  const PhiOptions phi = lc.config.nsa.phi_options();
  const Documents documents = edge_documents(lc, exchange, ranges);
  const Pair x = exchange.gather(ctx, local.k[kCmp], local.v[kCmp], ranges.edges, "cmp, not yet compressed");
  const Pair y = exchange.alloc(s.k_cmp.dtype, ranges.blocks);
  nsa_compress_forward(ctx, y.k, x.k, w.phi_k, phi, documents);
  nsa_compress_forward(ctx, y.v, x.v, w.phi_v, phi, documents);
  exchange.gather_blocks(ctx, {s.k_cmp, s.v_cmp}, y, ranges.blocks, ranges.all_blocks);
}

// The gradients of the compressed branch's k and v, before compression, from those of the blocks.
void compress_backward(Context& ctx, const LayerContext& lc, const NsaGrad& grad, const NsaWeightGrads& dw,
                       ConstTensor dk, ConstTensor dv, const NsaIn& local, const NsaWeights& w,
                       const NsaRanges& ranges) {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(lc, scope);
  const PhiOptions phi = lc.config.nsa.phi_options();
  const Documents documents = edge_documents(lc, exchange, ranges);
  const Pair dy = exchange.reduce_blocks(ctx, dk, dv, ranges.blocks, ranges.all_blocks);
  const Pair x = exchange.gather(ctx, local.k[kCmp], local.v[kCmp], ranges.edges, "cmp, not yet compressed");
  const Pair dx = exchange.alloc(x.k.dtype, ranges.edges), sums = exchange.alloc(dk.dtype, ranges.edges);
  nsa_compress_backward(ctx, dx.k, dw.phi_k, dy.k, x.k, w.phi_k, phi, documents);
  nsa_compress_backward(ctx, dx.v, dw.phi_v, dy.v, x.v, w.phi_v, phi, documents);
  copy_rows(ctx, sums.k, dx.k);
  copy_rows(ctx, sums.v, dx.v);
  exchange.reduce(ctx, grad.k[kCmp], grad.v[kCmp], sums, ranges.edges, "cmp, not yet compressed");
}

}  // namespace

void context_nsa_forward(Context& ctx, const LayerContext& lc, Tensor out, const NsaSaved& s, const QkvViews& views,
                         const NsaWeights& w) {
  Scratch::Scope scope(ctx.scratch);
  const NsaConfig& c = lc.config.nsa;
  const Exchange exchange(lc, scope);
  const NsaRanges ranges(lc.layout, c);
  const NsaIn local = nsa_in(views, lc.documents), in = gathered(ctx, lc, exchange, local, ranges);
  nsa_compose_forward(ctx, out, s, in, nsa_composition(c, lc.keep_block_index),
                      {.gate = [&](Context& on) { nsa_gate_forward(on, s.gate, in.q, w.gate, c.gate); },
                       .compress = [&](Context& on) { compress(on, lc, s, local, w, ranges); }});
}

void context_nsa_backward(Context& ctx, const LayerContext& lc, const NsaGrad& grad, const NsaWeightGrads& dw,
                          ConstTensor dout, const QkvViews& views, const NsaSaved& s, const NsaWeights& w) {
  Scratch::Scope scope(ctx.scratch);
  const NsaConfig& c = lc.config.nsa;
  const Exchange exchange(lc, scope);
  const NsaRanges ranges(lc.layout, c);
  const NsaIn local = nsa_in(views, lc.documents), in = gathered(ctx, lc, exchange, local, ranges);
  const DType acc = acc_dtype(in.q.dtype);
  const Pair selected = exchange.alloc(acc, ranges.selected), window = exchange.alloc(acc, ranges.window);
  NsaGrad addends = grad;  // the gradients of gathered keys and values, over this rank's queries
  addends.k[kSel] = selected.k, addends.v[kSel] = selected.v;
  addends.k[kWin] = window.k, addends.v[kWin] = window.v;
  const auto gate_backward = [&](Context& on, ConstTensor dgate) {
    nsa_gate_backward(on, grad.dq_group, dw.gate, dgate, s.gate, in.q, w.gate, c.gate);
  };
  const auto phi_backward = [&](Context& on, ConstTensor dk, ConstTensor dv) {
    compress_backward(on, lc, grad, dw, dk, dv, local, w, ranges);
  };
  nsa_compose_backward(ctx, addends, dout, in, s, nsa_composition(c, false),
                       {.gate = gate_backward, .compress = phi_backward, .compress_on_side = false});
  exchange.reduce(ctx, grad.k[kSel], grad.v[kSel], selected, ranges.selected, "sel");
  exchange.reduce(ctx, grad.k[kWin], grad.v[kWin], window, ranges.window, "win");
}

void context_dense_forward(Context& ctx, const LayerContext& lc, const DenseSaved& s, const QkvViews& views) {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(lc, scope);
  const Pair all = exchange.gather(ctx, views.k[0], views.v[0], lc.layout.prefixes(), "dense attention");
  dense_attention_forward(ctx, s, {views.q, all.k, all.v, lc.documents});
}

void context_dense_backward(Context& ctx, const LayerContext& lc, const DenseGrad& grad, ConstTensor dout,
                            const QkvViews& views, const DenseSaved& s) {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(lc, scope);
  const RowRanges needs = lc.layout.prefixes();
  const Pair all = exchange.gather(ctx, views.k[0], views.v[0], needs, "dense attention");
  const Pair addends = exchange.alloc(acc_dtype(views.q.dtype), needs);
  dense_attention_backward(ctx, {grad.dq, addends.k, addends.v}, dout, {views.q, all.k, all.v, lc.documents}, s);
  exchange.reduce(ctx, grad.dk, grad.dv, addends, needs, "dense attention");
}

}  // namespace triad
