// The selection by a taught index (model `nsa.selector: index`): lists as nsa_select makes them (nsa/select.h), with a
// block's score that of its best token:
//   score[t,g,j] = max over the tokens s of block j of iq[t,g] . ik[s] / sqrt(di)
// Candidates are complete blocks, so t sees all their tokens. Scores are fp32 or wider and exist in no memory that
// grows with T * T. Equal scores: the lower block first; 0 equals -0, and a NaN counts as -inf. No gradient.
#pragma once
#include "kernels/nsa/select.h"

namespace triad {

// block_index [B,T,Hkv,n_sel] i32 overwritten  <-  iq [B,T,Hkv,di] T, ik [B,S,1,di] T: rotated, one key head for all
// groups. Of the options l_sel, n_sel, init_blocks and local_blocks are used. documents: positions and blocks are
// counted in each document, and lists hold ids; with documents.part, T is the number of queries, and ik has the row's
// tokens from the first one on, up to the last query or more.
void nsa_select_index(Context&, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions&,
                      const Documents& documents = {});

namespace cuda {
void nsa_select_index(Context&, Tensor block_index, ConstTensor iq, ConstTensor ik, const SelectOptions&,
                      const Documents& documents);
}  // namespace cuda
}  // namespace triad
