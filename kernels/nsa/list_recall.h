// What selection lists hold of dense attention (log.stats), measured in sampled rows. For a row (t, h), over all tokens
// s <= t of its document:
//   p[s] = exp(q.k_s / sqrt(dk) - lse)        mass of a set of tokens: the sum of p over it
// Tokens are divided into classes by their distance t - s: 0, 1, 2 to 3, 4 to 7, ...
#pragma once
#include "engine/context.h"
#include "kernels/common/documents.h"

namespace triad {

inline constexpr int64_t kDistanceClasses = 32;  // enough for any 31-bit distance
// Class c has the distances [distance_begin(c), distance_begin(c + 1)).
constexpr int64_t distance_begin(int64_t c) { return c == 0 ? 0 : int64_t{1} << (c - 1); }

// Whether a list of up to n blocks, ascending and filled up with -1, contains a block.
constexpr bool lists_block(const int32_t* list, int64_t n, int64_t block) {
  for (int64_t i = 0; i < n && list[i] >= 0 && list[i] <= block; ++i)
    if (list[i] == block) return true;
  return false;
}

struct ListRecall {
  Tensor mass;       // [R,Hq,2,kDistanceClasses] acc: each class's mass; of all its tokens, of those in listed blocks
  Tensor max_logit;  // [R,Hq] acc: the largest q.k_s / sqrt(dk)
};
// Overwrites out  <-  rows [R] i32: the sampled tokens, numbered in B*T; q [B,T,Hq,dk], k [B,T,Hkv,dk] T, rotated;
// block_index [B,T,Hkv,n] i32, contiguous, as nsa_select has it. All axes of q and k but the innermost may be strided.
// Work is linear in R * T. Rows that ranks share (documents.part) are refused.
void nsa_list_recall(Context&, const ListRecall& out, ConstTensor rows, ConstTensor q, ConstTensor k,
                     ConstTensor block_index, int64_t l_sel, const Documents& documents = {});

namespace cuda {
void nsa_list_recall(Context&, const ListRecall& out, ConstTensor rows, ConstTensor q, ConstTensor k,
                     ConstTensor block_index, int64_t l_sel, const Documents& documents);
}  // namespace cuda
}  // namespace triad
