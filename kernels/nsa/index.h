// The index of a taught selection (model `nsa.selector: index`): a small attention of its own, with one key head for
// all groups, that learns which tokens a group attends to. For row (t, g), over the keys j that the row sees in the
// branch that teaches it:
//   s[j] = iq[t,g] . ik[j] / sqrt(di)          Q = softmax of s: the student; lse = log sum_j exp(s[j])
//   P[j] = mean over the heads h of g of p_h[j]: the teacher, p_h as in nsa/attend.h
//   KL   = sum_j P[j] * (log P[j] - log Q[j])      loss = sum over the rows that count of KL
// P gets no gradient, so ds[j] = scale * (Q[j] - P[j]) in rows that count, else 0, and
//   diq = sum_j ds[j] ik[j] / sqrt(di);  dik[j] = sum_(t,g) ds[j] iq / sqrt(di)
// The selected branch teaches over the tokens <= t of the listed blocks, dense attention over all tokens <= t. Forward
// computes the lse along with the branch, and backward everything else: only there all heads' probabilities are known.
#pragma once
#include "kernels/nsa/attend.h"
#include "kernels/ops/cross_entropy.h"

namespace triad {

// Rotated, of the dtype of the branch's q. di is even. All axes but the innermost may be strided.
struct IndexIn {
  ConstTensor q;  // [B,T,Hkv,di] T
  ConstTensor k;  // [B,S,1,di] T, S as in the branch
};
// What the forward of a branch computes for its index.
struct IndexForward {
  IndexIn in;
  Tensor lse;  // [B,T,Hkv] acc, overwritten; -inf in rows without keys
};
// What the backward of a branch computes for its index.
struct IndexBackward {
  IndexIn in;
  ConstTensor lse;      // forward's
  Tensor dq;            // [B,T,Hkv,di] acc, overwritten
  Tensor dk;            // [B,S,1,di], overwritten; T, or acc
  Tensor loss;          // [1] f64, added to; without `scale`
  LossScale scale = 1;  // gradient of the objective with respect to `loss`
  // [B] i32: the row's tokens from this one on are padding, whose rows do not count (documents.part: counted in the
  // whole row). Absent: all rows count.
  ConstTensor padding_begin = {};
};

// Throw an Error that names `op` unless shapes and dtypes fit those of the branch.
void check_index(const char* op, const IndexForward&, const AttendIn&);
void check_index(const char* op, const IndexBackward&, const AttendIn&);

// Called by the branches' GPU code: queue the index kernels for forward or backward, on the route that runtime.kernels
// names for the selected branch. block_index and l_sel: the selected branch's block lists (nsa/attend_selected.h);
// block_index is absent for dense attention. lse: the branch's.
void index_forward_routed(Context&, const IndexForward&, const AttendIn&, ConstTensor block_index, int64_t l_sel);
void index_backward_routed(Context&, const IndexBackward&, const AttendIn&, ConstTensor lse, ConstTensor block_index,
                           int64_t l_sel);

namespace cuda {
void nsa_index_forward(Context&, const IndexForward&, const AttendIn&, ConstTensor block_index, int64_t l_sel);
void nsa_index_backward(Context&, const IndexBackward&, const AttendIn&, ConstTensor lse, ConstTensor block_index,
                        int64_t l_sel);
}  // namespace cuda
}  // namespace triad
