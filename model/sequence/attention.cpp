#include "model/sequence/attention.h"

#include <algorithm>

#include "engine/fork_join.h"
#include "kernels/nsa/document_tables.h"
#include "kernels/nsa/select_index.h"
#include "kernels/step/rows.h"
#include "model/sequence/exchange.h"
#include "model/sequence/index_keys.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

// Chunk i's rows in a tensor whose axis 1 is this rank's tokens.
template <class TensorType>
TensorType chunk_rows(const LayerContext& lc, const TensorType& t, int64_t i) {
  return lc.layout.rows_of_chunk(t, i);
}

// Document tables for chunk i's queries and the keys [first_key, end), allocated in `scope`.
Documents chunk_documents(Context& ctx, const LayerContext& lc, Scratch::Scope& scope, int64_t i, int64_t first_key,
                          int64_t end) {
  Documents documents = cut_documents(ctx, scope, lc.documents, first_key, end);
  documents.part = lc.layout.chunk_part(i, first_key);
  return documents;
}

// The key and value rows that an NSA layer exchanges with the ranks that share its sequences.
struct NsaRows {
  RowLists selected, window, edges, blocks, all_blocks;
  RowLists selected_of_first_chunk;  // what queries in a rank's first chunk see
  NsaRows(const SequenceLayout& layout, const NsaConfig& c)
      : selected(layout.prefixes()),
        window(layout.windows(c.w)),
        edges(layout.block_tokens(c.l, c.d)),
        blocks(layout.blocks(c.l, c.d)),
        all_blocks(layout.all_blocks(c.l, c.d)) {
    for (int64_t r = 0; r < layout.ranks; ++r) selected_of_first_chunk.push_back({{0, layout.chunk_of(r, 0).end}});
  }
};

// Calls call(documents, tokens, blocks) for each chunk that has blocks: the row ranges of its tokens and blocks in
// tensors that hold all chunks' rows, one chunk after the other.
template <class Call>
void for_each_compression(Context& ctx, const LayerContext& lc, const Exchange& exchange, const NsaRows& rows,
                          Call&& call) {
  RowRange tokens, blocks;
  for (int64_t i = 0; i < lc.layout.chunks(); ++i) {
    const RowRange edge = exchange.local(rows.edges)[static_cast<size_t>(i)];
    tokens = {tokens.end, tokens.end + edge.size()};
    blocks = {blocks.end, blocks.end + exchange.local(rows.blocks)[static_cast<size_t>(i)].size()};
    if (blocks.size() == 0) continue;
    Scratch::Scope scope(ctx.scratch);
    call(chunk_documents(ctx, lc, scope, i, edge.begin, edge.end), tokens, blocks);
  }
}

// Returns t if it is contiguous, otherwise a new tensor with the same shape: phi mlp needs contiguous blocks.
Tensor contiguous(Scratch::Scope& scope, const Tensor& t) {
  return t.contiguous() ? t : scope.alloc(t.dtype, t.shape());
}

// Computes this rank's compressed blocks from x, the keys and values in the blocks' tokens (NsaRows::edges).
KvRows compress(Context& ctx, const LayerContext& lc, const Exchange& exchange, const KvRows& x, const NsaWeights& w,
                const NsaRows& rows) {
  const PhiOptions phi = lc.nsa().phi_options();
  const KvRows y = exchange.alloc(x.k.dtype, rows.blocks);
  for_each_compression(ctx, lc, exchange, rows, [&](const Documents& documents, const RowRange& t, const RowRange& c) {
    Scratch::Scope inner(ctx.scratch);
    const KvRows from = x.rows(t.begin, t.end), to = y.rows(c.begin, c.end);
    const KvRows made = {contiguous(inner, to.k), contiguous(inner, to.v)};
    nsa_compress_forward(ctx, made.k, from.k, w.phi_k, phi, documents);
    nsa_compress_forward(ctx, made.v, from.v, w.phi_v, phi, documents);
    if (made.k.data != to.k.data) copy_kv(ctx, to, made);
  });
  return y;
}

// Computes this rank's addends to x's gradients from dy, its blocks' gradients.
KvRows compress_backward(Context& ctx, const LayerContext& lc, const Exchange& exchange, const NsaWeightGrads& dw,
                         const KvRows& dy, const KvRows& x, const NsaWeights& w, const NsaRows& rows) {
  const PhiOptions phi = lc.nsa().phi_options();
  const KvRows sums = exchange.alloc(dy.k.dtype, rows.edges);
  Scratch::Scope scope(ctx.scratch);
  const KvRows dx = exchange.in(scope).alloc(x.k.dtype, rows.edges);
  for_each_compression(ctx, lc, exchange, rows, [&](const Documents& documents, const RowRange& t, const RowRange& c) {
    Scratch::Scope inner(ctx.scratch);
    const KvRows from = x.rows(t.begin, t.end), to = dx.rows(t.begin, t.end), of_y = dy.rows(c.begin, c.end);
    const KvRows given = {contiguous(inner, of_y.k), contiguous(inner, of_y.v)};
    if (given.k.data != of_y.k.data) copy_kv(ctx, given, of_y);
    nsa_compress_backward(ctx, to.k, dw.phi_k, given.k, from.k, w.phi_k, phi, documents);
    nsa_compress_backward(ctx, to.v, dw.phi_v, given.v, from.v, w.phi_v, phi, documents);
  });
  copy_kv(ctx, sums, dx);
  return sums;
}

// The branches' inputs for each chunk.
class BranchInputs {
 public:
  // blocks, selected, window: the keys and values that this rank reads, with rows as in NsaRows. Document tables are
  // allocated in `scope`.
  BranchInputs(Context& ctx, const LayerContext& lc, Scratch::Scope& scope, ConstTensor q, KvRows blocks,
               KvRows selected, KvRows window, RowList windows)
      : lc_(lc),
        q_(q),
        blocks_(std::move(blocks)),
        selected_(std::move(selected)),
        window_(std::move(window)),
        windows_(std::move(windows)) {
    for (int64_t i = 0; i < lc.layout.chunks(); ++i) {
      const int64_t end = lc.layout.chunk(i).end;
      documents_.push_back(chunk_documents(ctx, lc, scope, i, 0, end));
      window_documents_.push_back(chunk_documents(ctx, lc, scope, i, windows_[static_cast<size_t>(i)].begin, end));
    }
  }

  // Chunk i's rows in the tensor that holds both chunks' windows.
  RowRange window_rows(int64_t i) const {
    const int64_t begin = i == 0 ? 0 : windows_[0].size();
    return {begin, begin + windows_[static_cast<size_t>(i)].size()};
  }
  AttendIn compressed_in(int64_t i) const { return in(i, blocks_, documents_); }
  AttendIn selected_in(int64_t i) const { return in(i, selected_.rows(0, lc_.layout.chunk(i).end), documents_); }
  AttendIn window_in(int64_t i) const {
    const RowRange rows = window_rows(i);
    return in(i, window_.rows(rows.begin, rows.end), window_documents_);
  }

 private:
  AttendIn in(int64_t i, const KvRows& keys, const std::vector<Documents>& documents) const {
    return {chunk_rows(lc_, q_, i), keys.k, keys.v, documents[static_cast<size_t>(i)]};
  }

  const LayerContext& lc_;
  ConstTensor q_;
  KvRows blocks_, selected_, window_;
  RowList windows_;
  std::vector<Documents> documents_, window_documents_;  // tables for each chunk's queries
};

// Whether a forward needs the index, to select blocks or to compute the index's lse. A recomputation has both results.
bool uses_index(const LayerContext& lc) { return !lc.keep_block_index || lc.teaches_index; }

// Adds `first`, addends for the first rows only, to `all`.
void add_first(Context& ctx, const KvRows& all, const KvRows& first) {
  const KvRows rows = all.rows(0, first.k.size(1));
  const RowPair pairs[] = {{rows.k, first.k}, {rows.v, first.v}};
  add_rows(ctx, pairs);
}

// Calls work(context, chunk) for each chunk. The chunks before the last one are computed on a side stream, where they
// fill the SMs that the last chunk's last CTAs leave free. apart: whether to use the side stream, which needs scratch
// memory for two chunks at a time; otherwise all chunks run one after the other.
template <class Work>
void for_each_chunk(Context& ctx, const LayerContext& lc, Work&& work, bool apart = true) {
  const int64_t last = lc.layout.chunks() - 1;
  ForkJoin earlier(
      ctx, 2,
      [&](Context& side) {
        for (int64_t i = 0; i < last; ++i) work(side, i);
      },
      apart);
  work(ctx, last);
  earlier.join();
}

class SharedSequences : public AttentionExec {
 public:
  explicit SharedSequences(SequenceGroup& group) : group_(group) {}
  void nsa_forward(Context&, const LayerContext&, Tensor out, const NsaSaved&, const QkvViews& in,
                   const NsaWeights&) const override;
  void nsa_backward(Context&, const LayerContext&, const NsaGrad&, const NsaWeightGrads& dw, ConstTensor dout,
                    const QkvViews& in, const NsaSaved&, const NsaWeights&) const override;
  void dense_forward(Context&, const LayerContext&, const DenseSaved&, const QkvViews& in,
                     const IndexForward* index) const override;
  void dense_backward(Context&, const LayerContext&, const DenseGrad&, ConstTensor dout, const QkvViews& in,
                      const DenseSaved&, const IndexBackward* index) const override;
  void selected_forward(Context&, const LayerContext&, const SelectedSaved&, const QkvViews& in) const override;
  void selected_backward(Context&, const LayerContext&, const DenseGrad&, ConstTensor dout, const QkvViews& in,
                         const SelectedSaved&, const IndexBackward* index) const override;
  void window_forward(Context&, const LayerContext&, const DenseSaved&, const QkvViews& in) const override;
  void window_backward(Context&, const LayerContext&, const DenseGrad&, ConstTensor dout, const QkvViews& in,
                       const DenseSaved&) const override;

 private:
  // Attention with one softmax over keys anywhere before the query. attend(chunk, out, in) computes a chunk's forward,
  // attend(chunk, grad, dout, in, saved) its backward.
  template <class Attend>
  void one_softmax_forward(Context&, const LayerContext&, const DenseSaved&, const QkvViews& in, const char* branch,
                           const Attend& attend) const;
  template <class Attend>
  void one_softmax_backward(Context&, const LayerContext&, const DenseGrad&, ConstTensor dout, const QkvViews& in,
                            const DenseSaved&, const char* branch, const Attend& attend) const;

  SequenceGroup& group_;
};

// Computes in the order of nsa/compose.cpp, each branch once per chunk. The selected branch's keys are transferred
// while the compressed branch computes.
void SharedSequences::nsa_forward(Context& ctx, const LayerContext& lc, Tensor out, const NsaSaved& s,
                                  const QkvViews& views, const NsaWeights& w) const {
  Scratch::Scope scope(ctx.scratch);
  const NsaConfig& c = lc.nsa();
  const Exchange exchange(group_, lc, scope);
  const NsaRows rows(lc.layout, c);
  const NsaIn local = nsa_in(views, lc.documents);
  const IndexKeys index(ctx, group_, lc, scope, uses_index(lc) ? views : QkvViews{});
  const PendingRows edges = exchange.gather(ctx, local.k[kCmp], local.v[kCmp], rows.edges, "cmp, not yet compressed");
  const PendingRows near = exchange.gather(ctx, local.k[kWin], local.v[kWin], rows.window, "win");
  const KvRows all = exchange.alloc(local.k[kSel].dtype, rows.selected);
  const BranchInputs in(ctx, lc, scope, local.q, {s.k_cmp, s.v_cmp}, all, near.pair, exchange.local(rows.window));
  const auto out_of = [&](int branch, int64_t i) {
    return AttendOut{chunk_rows(lc, s.o[branch], i), chunk_rows(lc, s.lse[branch], i)};
  };
  ForkJoin window(ctx, 0, [&](Context& side) {
    near.finish(side);
    for (int64_t i = 0; i < lc.layout.chunks(); ++i)
      nsa_attend_window_forward(side, out_of(kWin, i), in.window_in(i), c.w);
  });
  nsa_gate_forward(ctx, s.gate, local.q, w.gate, c.gate);
  const KvRows mine = compress(ctx, lc, exchange, edges.finish(ctx), w, rows);
  const PendingRows blocks = exchange.gather_blocks(ctx, {s.k_cmp, s.v_cmp}, mine, rows.blocks, rows.all_blocks);
  const PendingRows selected = exchange.gather(ctx, all, local.k[kSel], local.v[kSel], rows.selected, "sel");
  blocks.finish(ctx);
  index.finish(ctx);
  for_each_chunk(ctx, lc, [&](Context& on, int64_t i) {
    const AttendIn compressed = in.compressed_in(i);
    const AttendOut compressed_out = out_of(kCmp, i);
    nsa_attend_compressed_forward(on, compressed_out, compressed, c);
    if (lc.keep_block_index) return;
    const Tensor lists = chunk_rows(lc, s.block_index, i);
    if (const IndexIn from = index.in(i); !from.q.empty())
      nsa_select_index(on, lists, from.q, from.k, c, compressed.documents);
    else
      nsa_select(on, lists, compressed.q, s.k_cmp, compressed_out.lse, c, compressed.documents);
  });
  selected.finish(ctx);
  window.join();
  for_each_chunk(ctx, lc, [&](Context& on, int64_t i) {
    const Tensor lists = chunk_rows(lc, s.block_index, i);
    const CombineAlong combine{chunk_rows(lc, out, i), chunk_rows(lc, s.o[kCmp], i), chunk_rows(lc, s.o[kWin], i),
                               s.gate.slice(2, i * lc.layout.chunk_tokens, (i + 1) * lc.layout.chunk_tokens)};
    const AttendIn selected_in = in.selected_in(i);
    const AttendOut selected_out = out_of(kSel, i);
    const std::optional<IndexForward> taught = index.forward(i, s.index_lse);
    const IndexForward* const along = taught ? &*taught : nullptr;
    if (nsa_attend_selected_combines(on, selected_out, selected_in, lists, c.l_sel, combine)) {
      nsa_attend_selected_forward(on, selected_out, selected_in, lists, c.l_sel, &combine, along);
    } else {
      nsa_attend_selected_forward(on, selected_out, selected_in, lists, c.l_sel, nullptr, along);
      nsa_combine_forward(on, combine.out, {combine.o_cmp, selected_out.o, combine.o_win}, combine.gate);
    }
  });
}

// Keys are transferred while the gates' gradients are computed, and each branch's key gradients while the next branch
// computes.
void SharedSequences::nsa_backward(Context& ctx, const LayerContext& lc, const NsaGrad& grad, const NsaWeightGrads& dw,
                                   ConstTensor dout, const QkvViews& views, const NsaSaved& s,
                                   const NsaWeights& w) const {
  Scratch::Scope scope(ctx.scratch);
  const NsaConfig& c = lc.nsa();
  const Exchange exchange(group_, lc, scope);
  const NsaRows rows(lc.layout, c);
  const NsaIn local = nsa_in(views, lc.documents);
  const PendingRows pending_window = exchange.gather(ctx, local.k[kWin], local.v[kWin], rows.window, "win");
  const PendingRows pending_keys = exchange.gather(ctx, local.k[kSel], local.v[kSel], rows.selected, "sel");
  const IndexKeys index(ctx, group_, lc, scope, views);
  const PendingRows edges = exchange.gather(ctx, local.k[kCmp], local.v[kCmp], rows.edges, "cmp, not yet compressed");
  const DType acc = acc_dtype(local.q.dtype);
  const Tensor dgate = scope.alloc(acc, s.gate.shape()), dout_norm = scope.alloc(acc, s.lse[kCmp].shape());
  const Tensor delta = scope.alloc(acc, {3, lc.B, lc.T, lc.config.n_heads});
  nsa_combine_backward(ctx, dgate, delta, dout, {s.o[kCmp], s.o[kSel], s.o[kWin]}, s.gate, grad.out, dout_norm);
  zero(ctx, grad.dq);
  const KvRows &near = pending_window.finish(ctx), &keys = pending_keys.finish(ctx);
  const BranchInputs in(ctx, lc, scope, local.q, {s.k_cmp, s.v_cmp}, keys, near, exchange.local(rows.window));
  // Document tables are not passed here, so a dq row's rounding unit allows for every key that this rank has gathered.
  // The keys that the row's query sees are among these.
  const std::vector<RoundingUnitBranch> branches = {{s.k_cmp, s.v_cmp, s.gate[kCmp], delta[kCmp], c.d},
                                                    {keys.k, keys.v, s.gate[kSel], delta[kSel]},
                                                    {near.k, near.v, s.gate[kWin], delta[kWin]}};
  const Tensor key_norms = scope.alloc(acc, key_norms_shape(branches));
  attend_key_norms(ctx, key_norms, grad.dq, dout, local.q, branches);
  const Tensor unit = attend_rounding_unit(ctx, scope, grad.dq, dout, local.q, branches, dout_norm, key_norms);
  const auto upstream = [&](int b, int64_t i) {
    return AttendGradIn{chunk_rows(lc, dout, i), chunk_rows(lc, ConstTensor(s.gate[b]), i),
                        chunk_rows(lc, ConstTensor(delta[b]), i), chunk_rows(lc, ConstTensor(s.lse[b]), i),
                        unit.empty() ? ConstTensor{} : chunk_rows(lc, ConstTensor(unit), i)};
  };
  const auto to = [&](const KvRows& pair, int64_t i) {
    return AttendGradOut{chunk_rows(lc, grad.dq, i), pair.k, pair.v};
  };

  // Gradients for the gathered keys and values: from the last chunk's queries, which see the most keys, and from the
  // earlier chunk's (_earlier).
  const bool any_order = !unit.empty();
  const int64_t last = lc.layout.chunks() - 1;
  const KvRows dkeys = exchange.alloc(acc, rows.selected), dnear = exchange.alloc(acc, rows.window);
  const KvRows dblocks = exchange.alloc(acc, rows.all_blocks);
  const KvRows dkeys_earlier = exchange.alloc(acc, rows.selected_of_first_chunk);
  const KvRows dblocks_earlier = exchange.alloc(acc, rows.all_blocks);
  ForkJoin window(
      ctx, 0,
      [&](Context& side) {
        for (int64_t i = 0; i <= last; ++i) {
          const RowRange window_rows = in.window_rows(i);
          nsa_attend_window_backward(side, to(dnear.rows(window_rows.begin, window_rows.end), i), upstream(kWin, i),
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
  // The selected branch's partial sums of dk and dv take the most memory of all. Long chunks are computed one after the
  // other, so that only one has them at a time: SMs that stay free at a long chunk's end cost it nothing.
  constexpr int64_t kLongChunk = 1 << 16;
  index.finish(ctx);
  const IndexGradients index_grads(ctx, lc, scope, index, grad.index);
  for_each_chunk(
      ctx, lc,
      [&](Context& on, int64_t i) {
        const KvRows sums = i == last ? dkeys.rows(0, lc.layout.chunk(i).end) : dkeys_earlier;
        nsa_attend_selected_backward(on, to(sums, i), upstream(kSel, i), in.selected_in(i),
                                     chunk_rows(lc, s.block_index, i), c.l_sel, index_grads.chunk(i));
      },
      any_order && lc.layout.chunk_tokens < kLongChunk);
  add_first(ctx, dkeys, dkeys_earlier);
  const PendingRows sel = exchange.reduce(ctx, dkeys, rows.selected, "sel");
  index_grads.reduce(ctx, group_);
  compressed.join();
  const PendingRows dmine = exchange.reduce(ctx, dblocks, rows.blocks, rows.all_blocks, "cmp");
  window.join();
  const PendingRows win = exchange.reduce(ctx, dnear, rows.window, "win");
  nsa_gate_backward(ctx, grad.dq_group, dw.gate, dgate, s.gate, local.q, w.gate, c.gate);
  const KvRows dedges = compress_backward(ctx, lc, exchange, dw, dmine.finish(ctx), edges.finish(ctx), w, rows);
  const PendingRows cmp = exchange.reduce(ctx, dedges, rows.edges, "cmp, not yet compressed");
  store(ctx, grad.k[kSel], grad.v[kSel], sel);
  store(ctx, grad.k[kWin], grad.v[kWin], win);
  store(ctx, grad.k[kCmp], grad.v[kCmp], cmp);
}

template <class Attend>
void SharedSequences::one_softmax_forward(Context& ctx, const LayerContext& lc, const DenseSaved& s,
                                          const QkvViews& views, const char* branch, const Attend& attend) const {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(group_, lc, scope);
  const PendingRows pending = exchange.gather(ctx, views.k[0], views.v[0], lc.layout.prefixes(), branch);
  const KvRows& all = pending.finish(ctx);
  for (int64_t i = 0; i < lc.layout.chunks(); ++i) {
    const KvRows seen = all.rows(0, lc.layout.chunk(i).end);
    attend(i, DenseSaved{chunk_rows(lc, s.o, i), chunk_rows(lc, s.lse, i)},
           AttendIn{chunk_rows(lc, views.q, i), seen.k, seen.v,
                    chunk_documents(ctx, lc, scope, i, 0, lc.layout.chunk(i).end)});
  }
}

template <class Attend>
void SharedSequences::one_softmax_backward(Context& ctx, const LayerContext& lc, const DenseGrad& grad,
                                           ConstTensor dout, const QkvViews& views, const DenseSaved& s,
                                           const char* branch, const Attend& attend) const {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(group_, lc, scope);
  const RowLists needs = lc.layout.prefixes();
  const PendingRows pending = exchange.gather(ctx, views.k[0], views.v[0], needs, branch);
  const KvRows& all = pending.finish(ctx);
  const KvRows addends = exchange.alloc(acc_dtype(views.q.dtype), needs);
  for (int64_t i = lc.layout.chunks() - 1; i >= 0; --i) {
    Scratch::Scope inner(ctx.scratch);
    const bool last = i == lc.layout.chunks() - 1;
    const int64_t end = lc.layout.chunk(i).end;
    const KvRows seen = all.rows(0, end);
    const KvRows its = (last ? addends : exchange.in(inner).alloc(addends.k.dtype, needs)).rows(0, end);
    attend(i, DenseGrad{chunk_rows(lc, grad.dq, i), its.k, its.v}, chunk_rows(lc, dout, i),
           AttendIn{chunk_rows(lc, views.q, i), seen.k, seen.v, chunk_documents(ctx, lc, inner, i, 0, end)},
           DenseSaved{chunk_rows(lc, s.o, i), chunk_rows(lc, s.lse, i)});
    if (!last) add_first(ctx, addends, its);
  }
  store(ctx, grad.dk, grad.dv, exchange.reduce(ctx, addends, needs, branch));
}

SelectedSaved chunk_saved(const LayerContext& lc, const SelectedSaved& s, int64_t i) {
  return {chunk_rows(lc, s.block_index, i), chunk_rows(lc, s.o, i), chunk_rows(lc, s.lse, i),
          chunk_rows(lc, s.index_lse, i)};
}

void SharedSequences::dense_forward(Context& ctx, const LayerContext& lc, const DenseSaved& s, const QkvViews& views,
                                    const IndexForward* index) const {
  Scratch::Scope scope(ctx.scratch);
  const IndexKeys keys(ctx, group_, lc, scope, index == nullptr ? QkvViews{} : views);
  keys.finish(ctx);
  one_softmax_forward(ctx, lc, s, views, "dense attention", [&](int64_t i, const DenseSaved& out, const AttendIn& in) {
    const std::optional<IndexForward> taught = keys.forward(i, index == nullptr ? Tensor{} : index->lse);
    dense_attention_forward(ctx, out, in, taught ? &*taught : nullptr);
  });
}

void SharedSequences::dense_backward(Context& ctx, const LayerContext& lc, const DenseGrad& grad, ConstTensor dout,
                                     const QkvViews& views, const DenseSaved& s, const IndexBackward* index) const {
  Scratch::Scope scope(ctx.scratch);
  const IndexKeys keys(ctx, group_, lc, scope, index == nullptr ? QkvViews{} : views);
  keys.finish(ctx);
  const IndexGradients index_grads(ctx, lc, scope, keys, index);
  one_softmax_backward(
      ctx, lc, grad, dout, views, s, "dense attention",
      [&](int64_t i, const DenseGrad& to, ConstTensor upstream, const AttendIn& in, const DenseSaved& saved) {
        dense_attention_backward(ctx, to, upstream, in, saved, index_grads.chunk(i));
      });
  index_grads.reduce(ctx, group_);
}

void SharedSequences::selected_forward(Context& ctx, const LayerContext& lc, const SelectedSaved& s,
                                       const QkvViews& views) const {
  Scratch::Scope scope(ctx.scratch);
  const IndexKeys keys(ctx, group_, lc, scope, uses_index(lc) ? views : QkvViews{});
  keys.finish(ctx);
  one_softmax_forward(ctx, lc, {s.o, s.lse}, views, "sel", [&](int64_t i, const DenseSaved&, const AttendIn& in) {
    selected_attention_forward(ctx, chunk_saved(lc, s, i), in, keys.in(i), lc.nsa(), lc.keep_block_index);
  });
}

void SharedSequences::selected_backward(Context& ctx, const LayerContext& lc, const DenseGrad& grad, ConstTensor dout,
                                        const QkvViews& views, const SelectedSaved& s,
                                        const IndexBackward* index) const {
  Scratch::Scope scope(ctx.scratch);
  const IndexKeys keys(ctx, group_, lc, scope, views);
  keys.finish(ctx);
  const IndexGradients index_grads(ctx, lc, scope, keys, index);
  one_softmax_backward(
      ctx, lc, grad, dout, views, {s.o, s.lse}, "sel",
      [&](int64_t i, const DenseGrad& to, ConstTensor upstream, const AttendIn& in, const DenseSaved&) {
        selected_attention_backward(ctx, to, upstream, in, chunk_saved(lc, s, i), lc.nsa().l_sel, index_grads.chunk(i));
      });
  index_grads.reduce(ctx, group_);
}

void SharedSequences::window_forward(Context& ctx, const LayerContext& lc, const DenseSaved& s,
                                     const QkvViews& views) const {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(group_, lc, scope);
  const RowLists windows = lc.layout.windows(lc.nsa().w);
  const PendingRows near = exchange.gather(ctx, views.k[0], views.v[0], windows, "win");
  const BranchInputs in(ctx, lc, scope, views.q, {}, {}, near.finish(ctx), exchange.local(windows));
  for (int64_t i = 0; i < lc.layout.chunks(); ++i)
    window_attention_forward(ctx, {chunk_rows(lc, s.o, i), chunk_rows(lc, s.lse, i)}, in.window_in(i), lc.nsa().w);
}

void SharedSequences::window_backward(Context& ctx, const LayerContext& lc, const DenseGrad& grad, ConstTensor dout,
                                      const QkvViews& views, const DenseSaved& s) const {
  Scratch::Scope scope(ctx.scratch);
  const Exchange exchange(group_, lc, scope);
  const RowLists windows = lc.layout.windows(lc.nsa().w);
  const PendingRows near = exchange.gather(ctx, views.k[0], views.v[0], windows, "win");
  const BranchInputs in(ctx, lc, scope, views.q, {}, {}, near.finish(ctx), exchange.local(windows));
  const KvRows addends = exchange.alloc(acc_dtype(views.q.dtype), windows);
  for (int64_t i = 0; i < lc.layout.chunks(); ++i) {
    const RowRange rows = in.window_rows(i);
    const KvRows its = addends.rows(rows.begin, rows.end);
    window_attention_backward(ctx, {chunk_rows(lc, grad.dq, i), its.k, its.v}, chunk_rows(lc, dout, i), in.window_in(i),
                              {chunk_rows(lc, s.o, i), chunk_rows(lc, s.lse, i)}, lc.nsa().w);
  }
  store(ctx, grad.dk, grad.dv, exchange.reduce(ctx, addends, windows, "win"));
}

}  // namespace

std::unique_ptr<const AttentionExec> shared_sequences(SequenceGroup& group) {
  return std::make_unique<SharedSequences>(group);
}

}  // namespace triad
