// NSA's selection (paper Eq. 9, 10 and the top-n): turns the compressed branch's probabilities into a block list.
//   weight(c, j) = |[c*d, c*d+l) intersect [j*l', (j+1)*l')| / l
//   score[t,g,j] = sum over g's heads h and visible c: weight(c, j) * exp(q_h.K_c/sqrt(dk) - lse[t,h])
// (t, g)'s list, cur = t / l': the forced blocks 0 .. init_blocks-1 and cur-local_blocks+1 .. cur, if they exist; then
// complete blocks, (j+1)*l' <= t+1, in order of (score descending, index ascending) until n are listed. The list is
// stored ascending, unique, padded with -1. Scores are fp32 or wider throughout. The selection has no gradient.
// With `every` R > 1 only the first of every R tokens in a document selects, and its list holds for all R. As R divides
// l', they have the same own block, so its forced blocks are theirs, too.
#pragma once
#include "engine/context.h"
#include "kernels/common/documents.h"
#include "kernels/nsa/compress.h"
#include "kernels/nsa/selection_rule.h"

namespace triad {

struct SelectOptions : CompressionBlocks {
  int64_t l_sel = 64, n_sel = 16;  // l': tokens in a selection block; n: blocks in a list
  int64_t init_blocks = 1, local_blocks = 2;
  int64_t every = 1;  // R: tokens that share a list

  constexpr SelectionRule<int64_t> rule(int64_t t) const { return {t, l_sel, n_sel, init_blocks, local_blocks}; }
  constexpr bool selects(int64_t t) const { return t % every == 0; }
};

// Throws an Error that names `op` if options.every R is not 1, unless it divides l_sel, and the queries begin at a
// token that selects: at their row's first, or without documents at a multiple of R.
void check_every(const char* op, const SelectOptions&, const Documents& documents = {});

// block_index [B,T,Hkv,n_sel] i32 overwritten  <-  q [B,T,Hq,dk] T, k_cmp [B,Tc,Hkv,dk] T, lse_cmp [B,T,Hq] acc
// documents: positions and blocks are counted in each document, and lists hold ids (common/documents.h).
void nsa_select(Context&, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                const SelectOptions&, const Documents& documents = {});

namespace cuda {
void nsa_select(Context&, Tensor block_index, ConstTensor q, ConstTensor k_cmp, ConstTensor lse_cmp,
                const SelectOptions&, const Documents& documents);
}  // namespace cuda
}  // namespace triad
