// Selection on the GPU with lists that tokens share (SelectOptions::every, nsa/select.h): only the first of every R
// tokens selects, then its list is copied to the others. Without documents these tokens are every R-th row, and a
// kernel is given views of these rows, whose row i is token R i, and the rows before the call's first one
// (RowPart) are counted likewise. In packed rows they are at other places in each document: there the kernels select
// for all tokens, which is as exact, but no faster.
#pragma once
#include "kernels/nsa/select.h"

namespace triad::cuda {

// Whether a call's kernel gets every o.every-th row alone.
inline bool selects_strided_rows(const SelectOptions& o, const Documents& documents) {
  return o.every > 1 && documents.empty();
}

// Every `every`-th element along axis 1, from the first on: [B,T,...] -> [B,ceil(T/every),...].
template <bool kConst>
BasicTensor<kConst> strided_rows(BasicTensor<kConst> t, int64_t every) {
  t.dim[1] = ceil_div(t.dim[1], every), t.stride[1] *= every;
  return t;
}

// block_index [B,T,Hkv,n] i32: the rows of tokens that share a list get that of the first of them.
void share_lists(Context&, Tensor block_index, int64_t every, const Documents&);

// Calls select(block_index, tensors..., options, documents) with what the call's kernel gets, then copies the lists to
// the tokens that share them. tensors: [B,T,...], a row per token. With options.every R > 1, row i is token R i, and
// documents.part.first_query counts in steps of R.
template <class Run, class... Tensors>
void select_shared(Context& ctx, Tensor block_index, const SelectOptions& o, const Documents& documents, Run&& select,
                   const Tensors&... tensors) {
  if (selects_strided_rows(o, documents)) {
    Documents of_rows = documents;
    of_rows.part.first_query /= o.every;
    select(strided_rows(block_index, o.every), strided_rows(tensors, o.every)..., o, of_rows);
  } else {
    SelectOptions of_all = o;
    of_all.every = 1;
    select(block_index, tensors..., of_all, documents);
  }
  if (o.every > 1) share_lists(ctx, block_index, o.every, documents);
}

}  // namespace triad::cuda
